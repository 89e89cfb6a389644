"""hidden-sampling-transform: the sampler truncates or penalises, and the learner does not."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import (
    column,
    difference,
    fraction,
    gap,
    known_tokens,
    mean,
    rms,
    rms_gap,
    row_numbers,
)
from klinic.evidence.record import StepRecord
from klinic.maths.arrays import segment_sum

TOLERANCE = 1e-4  # nats: rounding of fp32 engines
SHARE = 0.05  # of the tokens that must be lifted
ONE_SIDED = 20.0  # times as many tokens lifted as lowered
SIZE = 2e-3  # nats, mean lift
QUIET = 0.02  # nats: a gap below it leaves the reported log-probs for the learner's own
DEFICIT = 0.15  # of the entropy: how much less surprising than drawn tokens they must be
SCORES = 8.0  # standard errors; over groups, since completions of one prompt are alike
CLUSTERS = 24  # groups
NATS = 200.0  # of entropy in all: with less, a rare token that did not come is no evidence
LOWERED = 0.15  # of the tokens that stood before: a penalty lowers them, and the rest is lifted
SPARED = 0.02  # of the others, which no penalty lowers
EACH = 20  # tokens that stood before, and such that did not
ENOUGH = 50  # tokens


def judge(case: Case) -> Finding:
    """Flag tokens that were drawn from a narrower distribution than the recipe says.

    Looks for
        What the sampler reports above the learner's log-prob: where outcomes were left out, the
        rest was lifted, by the same for all tokens of a place and never lowered. Where the
        sampler reports bare log-probs, tokens that are less surprising than their entropy. And
        tokens that are lowered only if they stood in the row before.
    Why it matters
        Engines take top-p, top-k or penalties from a file beside the model without a word. The
        policy is then trained on tokens of another distribution than the one it is scored with.
    Confirmed when
        At least 5% of the tokens are lifted and twenty times fewer lowered; or, over many groups,
        their surprise is 15% below their entropy by eight standard errors; or tokens that stood
        before are lowered and no others. And the recipe names no such transform.
    Ruled out when
        Log-probs agree and surprise is entropy, or the recipe names the transform.
    Confused with
        temperature-on-one-side (tokens are lifted and lowered, along a line); stale-sampler (not
        before the first update).
    """
    declared = _declared(case.run["sampling"])
    if declared:
        return passed(f"the recipe names it: {declared}")
    lift = gap(case.record, "logp_sampler", "logp_old")
    if lift.size < ENOUGH:
        return no_data(f"fewer than {ENOUGH} trained tokens have a log-prob of both sides")
    up, down, by = fraction(lift > TOLERANCE), fraction(lift < -TOLERANCE), mean(lift)
    one_sided = up > SHARE and up > ONE_SIDED * down and by > SIZE
    seen, fresh = _lowered(case.record)
    if seen > LOWERED and fresh < SPARED:
        return failed(
            f"{seen:.0%} of the tokens that stood before in their row are lowered (limit "
            f"{LOWERED:.0%}), and {fresh:.0%} of the others (limit {SPARED:.0%}): a penalty for "
            "repetition",
            seen=seen,
            fresh=fresh,
        )
    summary = (
        f"{up:.0%} of the tokens are lifted and {down:.0%} lowered, by {by:+.3g} nats "
        f"in the mean (limits {SHARE:.0%}, a twentieth of it, {SIZE:g})"
    )
    measured = {"lifted": up, "lowered": down, "lift": by}
    if one_sided or rms_gap(case.record, "logp_sampler", "logp_old") > QUIET:
        return (failed if one_sided else passed)(summary, **measured)
    return _by_surprise(case, summary, measured)


def _lowered(record: StepRecord) -> tuple[float, float]:
    """Return the share of tokens that are lowered, of those that stood before and of the others."""
    if record.prompt_ids is None or record.prompt_offsets is None:
        return 0.0, 0.0
    lift = difference(record, "logp_sampler", "logp_old")
    known = known_tokens(record, "logp_sampler", "logp_old")
    if np.square(lift[known]).sum() < EACH * QUIET**2:  # then no such tokens are that far apart
        return 0.0, 0.0
    prompts = np.split(record.prompt_ids, record.prompt_offsets[1:-1])
    rows = np.split(record.token_ids, record.row_offsets[1:-1])
    pairs = zip(prompts, rows, strict=True)
    stood = np.array([seen for pair in pairs for seen in _stood_before(*pair)], dtype=bool)
    seen, fresh = lift[known & stood], lift[known & ~stood]
    if min(seen.size, fresh.size) < EACH or rms(seen) < QUIET:
        return 0.0, 0.0
    return float((seen < -TOLERANCE).mean()), float((fresh < -TOLERANCE).mean())


def _stood_before(prompt: np.ndarray, ids: np.ndarray) -> Iterator[bool]:
    """Yield of each token of a row whether it stands in the prompt or earlier in the row."""
    seen = set(prompt.tolist())
    for token in ids.tolist():
        yield token in seen
        seen.add(token)


def _by_surprise(case: Case, summary: str, measured: Mapping[str, float]) -> Finding:
    records = [r for r in case.window if r.entropy is not None and r.logp_old is not None]
    found = [case.of(_surprise, record) for record in records]
    groups = np.concatenate([by_group for by_group, _ in found])
    nats = sum(total for _, total in found)
    if len(groups) < CLUSTERS or nats < NATS:
        return passed(summary, **measured)
    scores = float(groups.mean() / (groups.std(ddof=1) / np.sqrt(len(groups)) + 1e-12))
    rows_per_group = sum(record.num_rows for record in records) / len(groups)
    deficit = -float(groups.sum()) / nats * rows_per_group
    wrong = scores < -SCORES and deficit > DEFICIT
    says = (
        f"{summary}; tokens are {deficit:.1%} less surprising than their entropy (limit "
        f"{DEFICIT:.0%}), by {-scores:.1f} standard errors (limit {SCORES:g})"
    )
    return (failed if wrong else passed)(says, **measured, deficit=deficit, scores=scores)


def _surprise(record: StepRecord) -> tuple[np.ndarray, float]:
    """Return surprise less entropy, summed over rows and averaged in groups, and the entropy.

    In rows it is a sum of terms whose mean is 0 whatever came before, so lengths do not bias it.
    """
    known = known_tokens(record, "logp_old", "entropy")
    entropy = column(record, "entropy")
    excess = np.where(known, -column(record, "logp_old") - entropy, 0.0)
    rows = segment_sum(excess, row_numbers(record), record.num_rows)
    numbers, group = np.unique(record.group, return_inverse=True)
    means = np.bincount(group, weights=rows) / np.bincount(group)
    return means[: len(numbers)], float(entropy[known].sum())


def _declared(sampling: Mapping[str, Any]) -> str:
    neutral = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    named = {k: sampling.get(k) for k, v in neutral.items() if sampling.get(k) not in (None, v)}
    if named.get("top_k") == -1:  # vLLM's way to say none
        del named["top_k"]
    return ", ".join(f"{name} {value}" for name, value in named.items())


CHECK = Check(
    name="hidden-sampling-transform",
    stage=Stage.SAMPLER,
    needs=("record.logp_sampler", "record.logp_old", "run.sampling"),
    fix="Sample for training from the whole distribution: top_p 1, top_k off, no penalties, and "
    "no file that sets them (vLLM: generation_config='vllm').",
    judge=judge,
    also=("record.entropy",),
    change={"sampling.top_p": 1.0, "sampling.top_k": 0, "sampling.min_p": 0.0},
    explains=("imprecise-logp", "broken-sampler"),
)
