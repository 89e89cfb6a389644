"""Candidate explanations of the gap between sampler and learner, which compete on one step.

The gap is `logp_sampler - logp_old` on the trained tokens. Each candidate gets the fraction of the
squared gap that it explains, between 0 and 1. Three kinds of candidates exist:

    predicted   a formula for the gap of a token, fitted on half of the rows, scored on the others
    one-sided   the sign of the gap by token: energy of the allowed sign minus that of the other
    localised   the tokens that may differ: 1 - mean square of the others / mean square of all

Symmetric noise and unrelated log-probs score about 0 in all of them. The best candidate that
reaches its limit explains the gap; without one, the gap is unexplained.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from jaxtyping import Bool, Float, Int

from klinic.checks.gap_contexts import context_slope, is_proportional, jumps_between_turns
from klinic.checks.gap_tokens import GapTokens, collect_gap_tokens, surprise_excess
from klinic.checks.measures import has_older_samples
from klinic.evidence.record import StepRecord

MIN_EXPLAINED = 0.5  # fraction of the squared gap: less leaves the larger part without a reason
MIN_AGREEMENT = 0.9  # the same for candidates by which all other tokens agree: a tenth is noise
MIN_SIZE = 1e-3  # nats, root mean square: below the limit of every check
MAX_ROUNDING = 0.03  # nats, root mean square of bf16 against fp32
MAX_ASYMMETRY = 0.15  # of the squared gap that is raised, from one half
MIN_TOKENS = 20  # tokens of each kind
MIN_EQUAL_NEIGHBOURS = 8  # tokens equal to their neighbour: fewer may be one sentence
MIN_POSITIONS = 24  # positions: the first tokens of any completion differ from the others
MIN_CHANGE = 0.05  # of the inverse temperature
MAX_TEMPERATURE_RATIO = 4.0  # times the temperature: beyond it the sides are unrelated
MIN_SIGN_ENERGY = 0.02  # fraction of the squared gap on each side of 0 that a temperature needs
MIN_SURPRISE_ERRORS = 5.0  # standard errors of surprise above entropy, which rule out truncation
MIN_SURPRISE_EXCESS = 1.0  # nats per token: a distribution of other contents, not of other width
MIN_LARGE_ERRORS = 2.0  # the same for so large an excess: few groups of like rows give few of them
MIN_DEVIANCE_ERRORS = 4.0  # standard errors by which a shifted position must fit better
MIN_ENTROPY = 0.02  # nats, added to the expected surprise: entropies of certain tokens are rounding
MIN_AFFECTED_FRACTION = 0.5  # of the tokens: a shift changes all, a forbidden token few positions
MAX_LOWERED_FRACTION = 0.01  # of the tokens: forbidding a token lowers no other
CLIP_MEDIANS = 3.0  # medians of the absolute gap: clips outliers in the second score of a formula
SHIFTS = (-1, 1, -2, 2)


class GapModel(StrEnum):
    """A candidate explanation."""

    RETOKENISED = "rows that do not survive decoding and encoding"
    PROMPT = "rows whose prompt differs"
    CACHE = "rows that a prefix cache served"
    ROUTING = "tokens routed to other experts"
    TURNS = "turns after the first reply"
    LAYOUT = "rows shorter than the longest of the batch"
    SHIFTED_COLUMN = "log-probs of neighbouring tokens"
    SHIFTED_LOGITS = "distributions of neighbouring positions"
    SHIFTED_IDS = "log-probs of neighbouring ids"
    PENALTY = "repeated tokens are lowered"
    TEMPERATURE = "another temperature"
    TRUNCATION = "a truncated distribution"
    SUPPRESSION = "a token that is forbidden at some positions"
    DIVIDED = "log-probs divided by a temperature after the softmax"
    POSITION = "later positions"


LOCALISED_MODELS = (GapModel.RETOKENISED, GapModel.PROMPT, GapModel.CACHE, GapModel.ROUTING)
"""Explanations by what was recorded about a row or its experts, which old weights may affect too;
the others exclude old weights."""

LIMITS = dict.fromkeys(
    (
        *(GapModel.LAYOUT, GapModel.SHIFTED_IDS, GapModel.PENALTY, GapModel.TRUNCATION),
        *(GapModel.SUPPRESSION, GapModel.POSITION, GapModel.TURNS, GapModel.DIVIDED),
    ),
    MIN_AGREEMENT,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GapFit:
    """The score of one candidate."""

    model: GapModel
    explained: float
    value: float = 0.0
    """Its parameter: the relative change of the inverse temperature, or the shift."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapCompetition:
    """The candidates of a step, the best first."""

    num_tokens: int
    size: float
    """Root mean square of the gap."""
    fits: tuple[GapFit, ...]

    @property
    def winner(self) -> GapFit | None:
        """The best candidate among those that reach their limits."""
        return next((fit for fit in self.fits if _reaches(fit)), None)

    def beyond_others(self, model: GapModel, explained: float) -> float:
        """Return what a candidate explains beyond the best other one that reaches its limit.

        Two causes that explain the same gap leave it open which of them is at work.
        """
        rivals = [fit.explained for fit in self.fits if fit.model is not model and _reaches(fit)]
        return explained - max(rivals, default=0.0)

    def explained_by(self, model: GapModel) -> float:
        """Return the fraction that a candidate explains; 0 if it could not be scored."""
        return next((fit.explained for fit in self.fits if fit.model is model), 0.0)

    def is_lost_by(self, model: GapModel) -> bool:
        """Return whether another candidate is the winner."""
        return self.winner is not None and self.winner.model is not model

    def is_won_by(self, *models: GapModel) -> bool:
        """Return whether one of the candidates is the winner."""
        return self.winner is not None and self.winner.model in models


def _reaches(fit: GapFit) -> bool:
    return fit.explained >= LIMITS.get(fit.model, MIN_EXPLAINED)


def compete_on_sampler_gap(record: StepRecord) -> GapCompetition:
    """Return the candidates for `logp_sampler - logp_old`; both columns must be present.

    There are none where tokens were sampled with older weights: two policies may differ in any
    form.
    """
    tokens = collect_gap_tokens(record, "logp_sampler")
    size = float(np.sqrt(np.mean(tokens.gap**2))) if tokens.gap.size else 0.0
    if tokens.gap.size < MIN_TOKENS or size < MIN_SIZE or has_older_samples(record):
        return GapCompetition(num_tokens=tokens.gap.size, size=size, fits=())
    candidates = LOCALISED if _is_rounding(tokens.gap, size) else CANDIDATES
    fits = [fit for model in candidates if (fit := model(tokens)) is not None]
    # of equal scores the first in the order of `CANDIDATES` wins: recorded facts before formulas
    fits.sort(key=lambda fit: -round(fit.explained, 2))
    return GapCompetition(num_tokens=tokens.gap.size, size=size, fits=tuple(fits))


def _is_rounding(gap: Float[np.ndarray, "K"], size: float) -> bool:
    """Return whether a gap is small and goes both ways: the step of a run in bf16, at no cost."""
    raised = float(np.sum(np.square(gap), where=gap > 0)) / (gap.size * size**2)
    return size < MAX_ROUNDING and abs(raised - 0.5) < MAX_ASYMMETRY


def _fit_localised(
    model: GapModel,
    gap: Float[np.ndarray, "K"],
    may_differ: Bool[np.ndarray, "K"],
    min_tokens: int = MIN_TOKENS,
) -> GapFit | None:
    """Score a candidate that says which tokens may differ."""
    num_differing = np.count_nonzero(may_differ)
    if min(num_differing, gap.size - num_differing) < min_tokens or not gap.any():
        return None
    others = float(np.mean(gap[~may_differ] ** 2)) / float(np.mean(gap**2))
    return GapFit(model=model, explained=max(0.0, 1 - others))


def _fit_rows(model: GapModel, rows: str) -> Callable[[GapTokens], GapFit | None]:
    def fit(tokens: GapTokens) -> GapFit | None:
        flags = tokens.row_flags(rows)
        return None if flags is None else _fit_localised(model, tokens.gap, flags)

    return fit


def _fit_routing(tokens: GapTokens) -> GapFit | None:
    if tokens.routing is None:
        return None
    return _fit_localised(GapModel.ROUTING, tokens.gap, tokens.routing > 0)


def _fit_turns(tokens: GapTokens) -> GapFit | None:
    is_later = tokens.in_later_turn
    if not jumps_between_turns(tokens, is_later):
        return None
    return _fit_localised(GapModel.TURNS, tokens.gap, is_later)


def _fit_layout(tokens: GapTokens) -> GapFit | None:
    """Score the rows that a batch pads: those with a shorter prompt than the longest."""
    lengths = tokens.prompt_lengths
    if lengths is None:
        return None
    is_padded = lengths < lengths.max(initial=0)
    fit = _fit_localised(GapModel.LAYOUT, tokens.gap, is_padded[tokens.row])
    if fit is None:
        return None
    # padding changes every padded row; a fault of a few rows may sit among them by chance
    row_gaps = tokens.row_gaps[is_padded]
    is_typical = np.nanmedian(row_gaps) > (1 - MIN_AGREEMENT) * np.nanmean(row_gaps)
    return fit if is_typical else None


def _fit_position(tokens: GapTokens) -> GapFit | None:
    """Score a gap that grows along the row, at equal surprise.

    Rounding grows with the surprise of a token, so the gap is divided by its size at tokens of
    similar surprise. The first third of the positions is compared with all.
    """
    if tokens.position.max() < MIN_POSITIONS or _fit_turns(tokens) is not None:
        return None
    ends = np.quantile(tokens.surprise, (0.25, 0.5, 0.75))
    kind = np.searchsorted(ends, tokens.surprise)
    scale = np.sqrt(np.bincount(kind, tokens.gap**2) / np.maximum(np.bincount(kind), 1))
    scaled = tokens.gap / np.maximum(scale[kind], np.finfo(float).tiny)
    thirds = np.quantile(tokens.position, (1 / 3, 2 / 3))
    part = np.searchsorted(thirds, tokens.position, side="right")
    sizes = [float(np.mean(scaled[part == n] ** 2)) if (part == n).any() else 0 for n in range(3)]
    if not sizes[0] < sizes[1] < sizes[2]:
        return None
    return _fit_localised(GapModel.POSITION, scaled, part > 0)


def _fit_shifted_column(tokens: GapTokens) -> GapFit | None:
    """Score `column[t] = logp_old[t + shift]`."""
    best: GapFit | None = None
    for shift in SHIFTS:
        here, there = tokens.neighbours(shift)
        if here.size < MIN_TOKENS:
            continue
        before, after = tokens.gap[here] ** 2, (tokens.other[here] - tokens.logp[there]) ** 2
        explained = max(0.0, 1 - float(after.sum()) / max(float(before.sum()), 1e-300))
        if best is None or explained > best.explained:
            best = GapFit(model=GapModel.SHIFTED_COLUMN, explained=explained, value=float(shift))
    return best


def _fit_shifted_logits(tokens: GapTokens) -> GapFit | None:
    """Score learner distributions that belong to a neighbouring position.

    The expected surprise of a token is the entropy of the distribution it was sampled from. If
    the logits are not shifted, the learner's entropy at t predicts the sampler's surprise at
    t + 1 better than that at t, and the learner's own surprise is far above its entropy.
    """
    excess = surprise_excess(tokens, tokens.logp)
    if excess.errors < MIN_SURPRISE_ERRORS or excess.mean < MIN_SURPRISE_EXCESS:
        return None
    if np.count_nonzero(np.abs(tokens.gap) > MIN_SIZE) < MIN_AFFECTED_FRACTION * tokens.gap.size:
        return None
    errors, shift = max(_deviance_gain(tokens, shift) for shift in (-1, 1))
    if errors < MIN_DEVIANCE_ERRORS:
        return None
    explained = min(1.0, excess.mean / float(np.mean(np.abs(tokens.gap))))
    return GapFit(model=GapModel.SHIFTED_LOGITS, explained=explained, value=float(shift))


def _deviance_gain(tokens: GapTokens, shift: int) -> tuple[float, int]:
    """Return by how many standard errors the shifted entropies fit better, and the shift.

    They predict the same sampler surprises; the fit is the log-likelihood of an exponential law,
    which is a proper score: in expectation no other prediction beats the true mean. Entropies that
    fit worse than one constant are those of another network, at any position.
    """
    here, there = tokens.neighbours(shift)
    if here.size < MIN_TOKENS or tokens.entropy is None:
        return 0.0, shift
    surprise = np.maximum(-tokens.other[there], 0)
    expected = tokens.entropy + MIN_ENTROPY
    constant = np.full(surprise.size, surprise.mean() + MIN_ENTROPY)
    shifted = _deviance(surprise, expected[here])
    if shifted.mean() > _deviance(surprise, constant).mean():
        return 0.0, shift
    gain = _deviance(surprise, expected[there]) - shifted
    counts = np.bincount(tokens.row[here])
    means = np.bincount(tokens.row[here], gain)[counts > 0] / counts[counts > 0]
    if means.size < 2:
        return 0.0, shift
    return float(means.mean() / (means.std(ddof=1) / np.sqrt(means.size) + 1e-12)), shift


def _deviance(
    surprise: Float[np.ndarray, "K"], expected: Float[np.ndarray, "K"]
) -> Float[np.ndarray, "K"]:
    """Return minus the log-likelihood of surprises under exponential laws of these means."""
    return np.asarray(np.log(expected) + surprise / expected)


def _fit_shifted_ids(tokens: GapTokens) -> GapFit | None:
    """Score log-probs of a neighbouring id: they are right where both ids are equal."""
    excesses = [surprise_excess(tokens, logp) for logp in (tokens.logp, tokens.other)]
    excess = max(excesses, key=lambda excess: excess.mean)
    if excess.errors < MIN_SURPRISE_ERRORS or excess.mean < MIN_SURPRISE_EXCESS:
        return None
    best: GapFit | None = None
    for shift in (-1, 1):
        here, there = tokens.neighbours(shift)
        differs = tokens.ids[here] != tokens.ids[there]
        if not _differs_typically(tokens.gap[here], differs):
            continue
        if _count_distinct(tokens, here[~differs]) < MIN_EQUAL_NEIGHBOURS:
            continue
        fit = _fit_localised(GapModel.SHIFTED_IDS, tokens.gap[here], differs, MIN_EQUAL_NEIGHBOURS)
        if fit is not None and (best is None or fit.explained > best.explained):
            best = GapFit(model=fit.model, explained=fit.explained, value=float(shift))
    return best


def _count_distinct(tokens: GapTokens, chosen: Int[np.ndarray, "P"]) -> int:
    """Return how many tokens have log-probs of their own: equal completions have the same."""
    both = np.stack([tokens.logp[chosen], tokens.other[chosen]]).round(6)
    return int(np.unique(both, axis=1).shape[1])


def _differs_typically(gap: Float[np.ndarray, "K"], differs: Bool[np.ndarray, "K"]) -> bool:
    """Return whether the median token has a large gap where ids differ, and none where equal."""
    if differs.all() or not differs.any():
        return False
    differing, equal = (float(np.median(np.abs(gap[kind]))) for kind in (differs, ~differs))
    return differing > MIN_SURPRISE_EXCESS and equal < (1 - MIN_AGREEMENT) * differing


def _fit_penalty(tokens: GapTokens) -> GapFit | None:
    """Score a penalty: it lowers tokens that occurred earlier and raises the others."""
    repeated = tokens.repeated
    if repeated is None:
        return None
    num_repeated = np.count_nonzero(repeated)
    if min(num_repeated, repeated.size - num_repeated) < MIN_TOKENS:
        return None
    agrees = np.where(repeated, tokens.gap < 0, tokens.gap > 0)
    lowered = float(np.sum(tokens.gap[repeated & (tokens.gap < 0)] ** 2))
    if lowered < MIN_SIGN_ENERGY * float(np.sum(tokens.gap**2)):
        return None
    return GapFit(model=GapModel.PENALTY, explained=_sign_score(tokens.gap, agrees))


def _fit_truncation(tokens: GapTokens) -> GapFit | None:
    """Score a truncation: it raises tokens, and keeps those that surprise the learner least."""
    excess = surprise_excess(tokens, tokens.logp)
    if excess.errors > (
        MIN_LARGE_ERRORS if excess.mean > MIN_SURPRISE_EXCESS else MIN_SURPRISE_ERRORS
    ):
        return None
    if _fit_divided(tokens) is not None:
        return None
    return GapFit(model=GapModel.TRUNCATION, explained=_sign_score(tokens.gap, tokens.gap > 0))


def _fit_suppression(tokens: GapTokens) -> GapFit | None:
    """Score a forbidden token: where it had mass, all others are raised, the chosen one included.

    Unlike a truncation, it may take away the likeliest token, so that what follows surprises the
    learner. It leaves most tokens as they are, or an id that occurs where nothing is raised, as the
    end token after a least length, occurs nowhere else.
    """
    is_lowered, is_raised = tokens.gap < -MIN_SIZE, tokens.gap > MIN_SIZE
    num_raised = np.count_nonzero(is_raised)
    is_most = num_raised > (1 - MIN_AFFECTED_FRACTION) * tokens.gap.size
    if num_raised < MIN_TOKENS or (is_most and not _has_forbidden_id(tokens, is_raised)):
        return None
    if np.count_nonzero(is_lowered) > MAX_LOWERED_FRACTION * tokens.gap.size:
        return None
    return GapFit(model=GapModel.SUPPRESSION, explained=_sign_score(tokens.gap, tokens.gap > 0))


def _has_forbidden_id(tokens: GapTokens, is_raised: Bool[np.ndarray, "K"]) -> bool:
    """Return whether the commonest id among unchanged tokens occurs at no raised one."""
    ids, counts = np.unique(tokens.ids[np.abs(tokens.gap) <= MIN_SIZE], return_counts=True)
    if counts.max(initial=0) < MIN_TOKENS:
        return False
    return not bool((tokens.ids[is_raised] == ids[counts.argmax()]).any())


def _sign_score(gap: Float[np.ndarray, "K"], agrees: Bool[np.ndarray, "K"]) -> float:
    squared = gap**2
    return max(0.0, float(squared[agrees].sum() - squared[~agrees].sum()) / float(squared.sum()))


def _fit_temperature(tokens: GapTokens) -> GapFit | None:
    """Score a temperature: gap = a logp + h(entropy), with a = b'/b - 1.

    At inverse temperature b' a log-prob is b'/b logp - log Z, and log Z depends on the
    distribution alone, here on its entropy. Log-probs that were divided instead of logits have
    h = 0. A truncation has no such a, and a gap on one side of 0 cannot tell them apart. For a = -1
    the sampler's log-probs do not depend on the learner's: two unrelated networks.
    """
    if tokens.entropy is None:
        return _fit_temperature_by_context(tokens)
    squared = tokens.gap**2
    raised = float(squared[tokens.gap > 0].sum() / squared.sum())
    fit_rows = tokens.row % 2 == 0
    if min(raised, 1 - raised) < MIN_SIGN_ENERGY or not fit_rows.any() or fit_rows.all():
        return None
    knots = np.quantile(tokens.entropy[fit_rows], (0.25, 0.5, 0.75))
    bends = np.maximum(tokens.entropy[:, None] - knots, 0)
    terms = np.column_stack([tokens.logp, tokens.entropy, bends])
    weights = np.linalg.lstsq(terms[fit_rows], tokens.gap[fit_rows], rcond=None)[0]
    change = float(weights[0])
    is_plausible = 1 / MAX_TEMPERATURE_RATIO < 1 + change < MAX_TEMPERATURE_RATIO
    if not is_plausible or abs(change) < MIN_CHANGE:
        return None
    rest = tokens.gap[~fit_rows] - terms[~fit_rows] @ weights
    by_entropy = np.linalg.lstsq(terms[fit_rows, 1:], tokens.other[fit_rows], rcond=None)[0]
    unrelated = tokens.other[~fit_rows] - terms[~fit_rows, 1:] @ by_entropy
    related = 1 - float(np.sum(rest**2)) / max(float(np.sum(unrelated**2)), np.finfo(float).tiny)
    return GapFit(
        model=GapModel.TEMPERATURE,
        explained=max(0.0, min(_held_out_score(tokens.gap[~fit_rows], rest), related)),
        value=change,
    )


def _fit_temperature_by_context(tokens: GapTokens) -> GapFit | None:
    """Score a temperature without entropies: gap = a logp + h, with one h for each context.

    h is -log of the sum of p^(1 + a), so it has the sign of a.
    """
    line = context_slope(tokens)
    if line is None or abs(line.slope) < MIN_CHANGE or line.explained < MIN_AGREEMENT:
        return None
    if not 1 / MAX_TEMPERATURE_RATIO < 1 + line.slope < MAX_TEMPERATURE_RATIO:
        return None
    normaliser = (tokens.gap - line.slope * tokens.logp) * np.sign(line.slope)
    agrees = float(np.mean(normaliser > -MAX_ROUNDING))
    if agrees < MIN_AGREEMENT:
        return None
    explained = min(line.explained, agrees)
    return GapFit(model=GapModel.TEMPERATURE, explained=explained, value=line.slope)


def _fit_divided(tokens: GapTokens) -> GapFit | None:
    """Score log-probs that were divided by a temperature: they miss the new normaliser.

    The gap is then -log of the sum of p^(1/T), a function of the distribution alone, of one sign,
    near (1/T - 1) times its entropy. After a truncation the two are not proportional.
    """
    if tokens.entropy is None or not _has_one_sign(tokens.gap) or not is_proportional(tokens):
        return None
    fit_rows = tokens.row % 2 == 0
    held_out = ~fit_rows
    if min(np.count_nonzero(fit_rows), np.count_nonzero(held_out)) < MIN_TOKENS:
        return None
    knots = np.quantile(tokens.entropy[fit_rows], (0.25, 0.5, 0.75))
    terms = np.column_stack([tokens.entropy, np.maximum(tokens.entropy[:, None] - knots, 0)])
    weights = np.linalg.lstsq(terms[fit_rows], tokens.gap[fit_rows], rcond=None)[0]
    gap, rest = tokens.gap[held_out], tokens.gap[held_out] - terms[held_out] @ weights
    explained = 1 - float(np.sum(rest**2)) / max(float(np.sum((gap - gap.mean()) ** 2)), 1e-300)
    slope = float(np.sum(tokens.gap) / max(float(np.sum(tokens.entropy)), 1e-300))
    if abs(slope) < MIN_CHANGE or explained < MIN_AGREEMENT:
        return None
    return GapFit(model=GapModel.DIVIDED, explained=explained, value=slope)


def _has_one_sign(gap: Float[np.ndarray, "K"]) -> bool:
    raised = float(np.sum(np.square(gap), where=gap > 0)) / float(np.sum(gap**2))
    return max(raised, 1 - raised) > 1 - MIN_SIGN_ENERGY


def _held_out_score(gap: Float[np.ndarray, "K"], rest: Float[np.ndarray, "K"]) -> float:
    """Return the explained fraction, the lower of squares and of values without outliers.

    Squares alone would let a few replaced tokens make a line; clipped values alone would ignore
    the few tokens that a temperature lowers.
    """
    limit = CLIP_MEDIANS * float(np.median(np.abs(gap)))
    clipped = np.minimum(np.abs(gap), limit) ** 2, np.minimum(np.abs(rest), limit) ** 2
    if not clipped[0].sum():
        return 0.0
    squares = 1 - float(np.sum(rest**2) / np.sum(gap**2))
    return max(0.0, min(squares, 1 - float(clipped[1].sum() / clipped[0].sum())))


LOCALISED: tuple[Callable[[GapTokens], GapFit | None], ...] = (
    _fit_rows(GapModel.PROMPT, "prompt_differs"),
    _fit_rows(GapModel.RETOKENISED, "retokenised"),
    _fit_rows(GapModel.CACHE, "cached"),
    _fit_routing,
    _fit_turns,
)
"""Candidates by what was recorded about a row or token."""

CANDIDATES: tuple[Callable[[GapTokens], GapFit | None], ...] = (
    *LOCALISED,
    _fit_shifted_column,
    _fit_shifted_logits,
    _fit_shifted_ids,
    _fit_layout,
    _fit_temperature,
    _fit_divided,
    _fit_penalty,
    _fit_truncation,
    _fit_suppression,
    _fit_position,
)
"""In the order of precedence for equal scores."""
