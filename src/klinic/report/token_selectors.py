"""Selects the completion of a step by its tokens: masks, ends, log-probs, ids, versions."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float

from klinic.checks.base import Case
from klinic.evidence.record import EmittedBy, StepRecord
from klinic.report.evidence_row import (
    EvidenceRow,
    RowSelector,
    be,
    count_by_row,
    flagged_positions,
    id_facts,
    int_fact,
    largest_positions,
    last_tokens,
    mean_by_row,
    next_is_same_row,
    row_with_most,
)
from klinic.report.logp_gaps import logp_gap, token_k3

MIN_GAP = 1e-6  # nats: below it a gap is float32 rounding, which shows nothing
MIN_EXCESS = 1e-3  # nats above 0: float32 logits of 100 leave less
SIDES = {
    "sampler": "policy and sampler",
    "reference": "policy and reference",
    "update": "the policy after and before the update",
}
SCORED = ("logp", "logp_old", "logp_ref", "logp_sampler")


def foreign_tokens(case: Case) -> EvidenceRow | None:
    """Select the row with the most trained tokens that the policy did not emit."""
    record = case.record
    if record.emitted_by is None:
        return None
    wrong = record.loss_mask & (record.emitted_by != EmittedBy.POLICY)
    num_trained = count_by_row(record, record.loss_mask)
    return _flagged(
        record,
        wrong,
        lambda row, num: (
            f"{num} of its {num_trained[row]} trained tokens {be(num)} not the policy's"
        ),
    )


def left_out_tokens(case: Case) -> EvidenceRow | None:
    """Select the trained row with the most tokens of the policy that are not trained on."""
    record = case.record
    if record.emitted_by is None:
        return None
    own = record.emitted_by == EmittedBy.POLICY
    is_last = ~next_is_same_row(record)
    is_last[:-1] |= own[:-1] & ~own[1:]  # the last of a turn may be left out
    is_used = np.repeat(count_by_row(record, record.loss_mask) > 0, np.diff(record.row_offsets))
    num_own = count_by_row(record, own)
    return _flagged(
        record,
        own & ~record.loss_mask & ~is_last & is_used,
        lambda row, num: (
            f"{num} of the policy's {num_own[row]} tokens in it {be(num)} not trained on"
        ),
    )


def end_inside(case: Case) -> EvidenceRow | None:
    """Select a row in which the policy goes on after an end token."""
    record = case.record
    is_end = np.isin(record.token_ids, id_facts(case.run, "eos_ids", "declared_eos_ids"))
    goes_on = next_is_same_row(record)
    if record.emitted_by is not None:  # an environment may reply
        goes_on[:-1] &= record.emitted_by[1:] == EmittedBy.POLICY
    return _flagged(record, is_end & goes_on, lambda *_: "it goes on after an end token")


def cut_at_end(case: Case) -> EvidenceRow | None:
    """Select a row that ends with an end token and counts as truncated."""
    record = case.record
    is_end = np.isin(record.token_ids, id_facts(case.run, "eos_ids"))
    wrong = is_end & _last_of_rows(record, "length")
    return _flagged(record, wrong, lambda *_: "it ends with an end token and counts as cut off")


def untrained_end(case: Case) -> EvidenceRow | None:
    """Select a row that ended on its own and whose last token is not trained on."""
    record = case.record
    wrong = _last_of_rows(record, "stop") & ~record.loss_mask
    return _flagged(record, wrong, lambda *_: "its end token is not trained on")


def ended_prompt(case: Case) -> EvidenceRow | None:
    """Select a row whose prompt ends with an end token."""
    record = case.record
    if record.prompt_ids is None or record.prompt_offsets is None:
        return None
    has_prompt = np.diff(record.prompt_offsets) > 1
    last = np.maximum(record.prompt_offsets[1:] - 1, 0)[has_prompt]
    is_end = np.isin(record.prompt_ids[last], id_facts(case.run, "eos_ids"))
    rows = np.flatnonzero(has_prompt)[is_end]
    return (
        EvidenceRow(row=int(rows[0]), reason="its prompt ends with an end token")
        if rows.size
        else None
    )


def truncated(case: Case) -> EvidenceRow | None:
    """Select the longest row that was cut off."""
    record = case.record
    if record.finish_reason is None:
        return None
    lengths = np.diff(record.row_offsets)
    cut = np.where(np.asarray(record.finish_reason) == "length", lengths, 0)
    if not cut.any():
        return None
    row = int(np.argmax(cut))
    return EvidenceRow(
        row=row, reason=f"it was cut off after {cut[row]} tokens", tokens=(int(cut[row]) - 1,)
    )


def gap_to(lane: str) -> RowSelector:
    """Return a selector of the row with the largest mean gap of a lane."""

    def largest_gap(case: Case) -> EvidenceRow | None:
        gaps = logp_gap(case.record, lane)
        return None if gaps is None else _gap_row(case.record, np.abs(gaps), lane)

    return largest_gap


def cached_prompt(case: Case) -> EvidenceRow | None:
    """Select the row with the largest gap to the sampler among those with a cached prefix."""
    record = case.record
    gaps = logp_gap(record, "sampler")
    if gaps is None or record.cached_tokens is None or not (record.cached_tokens > 0).any():
        return None
    is_cached = np.repeat(record.cached_tokens > 0, np.diff(record.row_offsets))
    chosen = _gap_row(record, np.where(is_cached, np.abs(gaps), np.nan), "sampler")
    if chosen is None:
        return None
    num = int(record.cached_tokens[chosen.row])
    reason = f"{num} of its prompt tokens came from the prefix cache; of such completions, it has "
    return EvidenceRow(
        row=chosen.row, reason=reason + chosen.reason.removeprefix("it has "), tokens=chosen.tokens
    )


def largest_k3(case: Case) -> EvidenceRow | None:
    """Select the row of the token that contributes most to the KL."""
    record = case.record
    k3_values = token_k3(record)
    if k3_values is None:
        return None
    sizes = np.nan_to_num(k3_values)
    if not sizes.size or sizes.max() < MIN_GAP**2:
        return None
    row = _row_of(record, int(np.argmax(sizes)))
    tokens = largest_positions(record, row, sizes)
    fraction = float(sizes.max() / sizes.sum())
    reason = (
        f"its token {tokens[0]} alone has {fraction:.0%} of the step's KL, {sizes.max():.3g} nats"
    )
    return EvidenceRow(row=row, reason=reason, tokens=tokens)


def above_zero(case: Case) -> EvidenceRow | None:
    """Select the row with the log-prob that exceeds 0 most."""
    record = case.record
    columns = [c for c in (getattr(record, name) for name in SCORED) if c is not None]
    if not columns or not record.num_tokens:
        return None
    highest = np.max([np.where(record.loss_mask, np.nan_to_num(c), 0.0) for c in columns], axis=0)
    if highest.max() <= MIN_EXCESS:
        return None
    row = _row_of(record, int(np.argmax(highest)))
    tokens = largest_positions(record, row, highest)
    reason = f"its token {tokens[0]} has a log-prob of {highest.max():.3g}, above 0"
    return EvidenceRow(row=row, reason=reason, tokens=tokens)


def not_finite_outside(case: Case) -> EvidenceRow | None:
    """Select the row with the most values that are not finite at tokens outside the loss."""
    record = case.record
    wrong = np.zeros(record.num_tokens, dtype=bool)
    for name in ("logp", "logp_old", "logp_ref", "token_advantage"):
        column = getattr(record, name)
        if column is not None:
            wrong |= ~np.isfinite(column)
    return _flagged(
        record,
        wrong & ~record.loss_mask,
        lambda _, num: f"values at {num} of its tokens that are not trained on are not finite",
    )


def lost_logps(case: Case) -> EvidenceRow | None:
    """Select the row with the most sampled tokens without a log-prob of the sampler."""
    record = case.record
    if record.logp_sampler is None or not np.isfinite(record.logp_sampler).any():
        return None
    lost = ~np.isfinite(record.logp_sampler) & record.loss_mask
    return _flagged(record, lost, lambda _, num: f"the sampler lost {num} of its log-probs")


def unknown_ids(case: Case) -> EvidenceRow | None:
    """Select the row with the most ids outside the vocabulary."""
    record = case.record
    size = int_fact(case.run, "vocabulary_size")
    if size is None:
        return None
    wrong = (record.token_ids < 0) | (record.token_ids >= size)
    return _flagged(
        record, wrong, lambda _, num: f"{num} of its ids {be(num)} outside the vocabulary of {size}"
    )


def reencoded(case: Case) -> EvidenceRow | None:
    """Select the first row whose decoded text has other ids."""
    return _first_false(case.record.round_trip, "its text, encoded again, gives other token ids")


def other_prompt(case: Case) -> EvidenceRow | None:
    """Select the first row that was sampled from another prompt than the learner scores."""
    return _first_false(case.record.prompt_ids_match, "the sampler received another prompt")


def highest_entropy(case: Case) -> EvidenceRow | None:
    """Select the row with the highest mean entropy."""
    record = case.record
    if record.entropy is None:
        return None
    values = np.where(record.loss_mask, record.entropy.astype(np.float64), np.nan)
    means = mean_by_row(record, values)
    if not means.size or not np.isfinite(means.max()):
        return None
    row = int(np.argmax(means))
    reason = f"its mean entropy of {means[row]:.3g} nats is the highest of the step"
    return EvidenceRow(row=row, reason=reason, tokens=largest_positions(record, row, values)[:1])


def oldest_samples(case: Case) -> EvidenceRow | None:
    """Select the row whose trained tokens were sampled with the oldest weights."""
    record = case.record
    version = record.facts.get("learner_version")
    if record.weight_version is None or not isinstance(version, int | float):
        return None
    lags = np.where(record.loss_mask, float(version) - record.weight_version, 0.0)
    if not lags.size or not lags.max() > 0:
        return None
    row = _row_of(record, int(np.argmax(lags)))
    reason = f"weights of {lags.max():.0f} updates before this step sampled it"
    return EvidenceRow(row=row, reason=reason, tokens=largest_positions(record, row, lags)[:1])


def other_experts(case: Case) -> EvidenceRow | None:
    """Select the row in which most layers route tokens to other experts than the sampler did."""
    record = case.record
    if record.routing_mismatch is None:
        return None
    values = np.clip(np.nan_to_num(record.routing_mismatch.astype(np.float64)), 0.0, 1.0)
    means = mean_by_row(record, values)
    if not means.size or not means.max() > 0:
        return None
    row = int(np.argmax(means))
    reason = f"{means[row]:.0%} of its tokens' layers used other experts"
    return EvidenceRow(row=row, reason=reason, tokens=largest_positions(record, row, values))


def _flagged(
    record: StepRecord, flags: Bool[np.ndarray, "N"], reason: Callable[[int, int], str]
) -> EvidenceRow | None:
    """Return the row with the most flagged tokens; `reason` receives it and their number."""
    row = row_with_most(record, flags)
    if row is None:
        return None
    num = int(count_by_row(record, flags)[row])
    return EvidenceRow(
        row=row, reason=reason(row, num), tokens=flagged_positions(record, row, flags)
    )


def _gap_row(record: StepRecord, sizes: Float[np.ndarray, "N"], lane: str) -> EvidenceRow | None:
    means = mean_by_row(record, sizes)
    if not means.size or means.max() < MIN_GAP:
        return None
    row = int(np.argmax(means))
    tokens = largest_positions(record, row, sizes)
    largest = float(sizes[record.row_offsets[row] + tokens[0]])
    reason = (
        f"it has the largest mean gap of the step between {SIDES[lane]}, {means[row]:.3g} nats, "
        f"with {largest:.3g} at token {tokens[0]}"
    )
    return EvidenceRow(row=row, reason=reason, tokens=tokens)


def _last_of_rows(record: StepRecord, finish: str) -> Bool[np.ndarray, "N"]:
    """Return a mask of the last tokens of rows with a finish reason."""
    flags = np.zeros(record.num_tokens, dtype=bool)
    if record.finish_reason is not None:
        reasons = np.asarray(record.finish_reason)[np.diff(record.row_offsets) > 0]
        flags[last_tokens(record)[reasons == finish]] = True
    return flags


def _first_false(flags: Bool[np.ndarray, "B"] | None, reason: str) -> EvidenceRow | None:
    if flags is None or bool(np.all(flags)):
        return None
    return EvidenceRow(row=int(np.argmin(flags)), reason=reason)


def _row_of(record: StepRecord, token: int) -> int:
    return int(np.searchsorted(record.row_offsets, token, side="right")) - 1
