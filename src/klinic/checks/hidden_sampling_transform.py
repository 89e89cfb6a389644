"""hidden-sampling-transform: the sampler truncates or penalises, the learner does not."""

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
SHARE = 0.05  # min fraction of raised tokens
ONE_SIDED = 20.0  # times as many tokens raised as lowered
SIZE = 2e-3  # nats, mean increase
QUIET = 0.02  # nats: below it, the reported log-probs equal the learner's
DEFICIT = 0.15  # fraction of the entropy that the surprise must be below it
SCORES = 8.0  # standard errors over groups, since completions of one prompt correlate
CLUSTERS = 24  # groups
NATS = 200.0  # total entropy: with less, an absent rare token is no evidence
LOWERED = 0.15  # fraction of repeated tokens: a penalty lowers them and raises the rest
SPARED = 0.02  # fraction of the other tokens, which no penalty lowers
EACH = 20  # repeated tokens, and others
ENOUGH = 50  # tokens


def judge(case: Case) -> Finding:
    """Flag tokens that were sampled from a narrower distribution than the recipe states.

    Looks for
        Sampler log-probs above those of the learner: where outcomes are cut off, the remaining
        ones are raised, all by the same amount at a position and never lowered. If the sampler
        reports unprocessed log-probs, tokens that are less surprising than their entropy. And
        tokens that are lowered only if they occurred earlier in the row.
    Why it matters
        Engines silently read top-p, top-k or penalties from a config file of the model. The
        policy is then trained on tokens of another distribution than the one it is scored with.
    Confirmed when
        At least 5% of the tokens are raised and twenty times fewer lowered; or, over many
        groups, their surprise is 15% below their entropy by eight standard errors; or tokens
        that occurred earlier are lowered and no others. And the recipe declares no such
        transform.
    Ruled out when
        Log-probs agree and surprise equals entropy, or the recipe declares the transform.
    Confused with
        temperature-on-one-side (tokens are raised and lowered, along a line); stale-sampler
        (not before the first update).
    """
    declared = _declared(case.run["sampling"])
    if declared:
        return passed(f"the recipe declares it: {declared}")
    lift = gap(case.record, "logp_sampler", "logp_old")
    if lift.size < ENOUGH:
        return no_data(f"fewer than {ENOUGH} trained tokens have a log-prob of both sides")
    up, down, by = fraction(lift > TOLERANCE), fraction(lift < -TOLERANCE), mean(lift)
    one_sided = up > SHARE and up > ONE_SIDED * down and by > SIZE
    seen, fresh = _lowered(case.record)
    if seen > LOWERED and fresh < SPARED:
        return failed(
            f"{seen:.0%} of the tokens that occurred earlier in their row are lowered (limit "
            f"{LOWERED:.0%}), and {fresh:.0%} of the others (limit {SPARED:.0%}): a "
            "repetition penalty",
            seen=seen,
            fresh=fresh,
        )
    summary = (
        f"{up:.0%} of the tokens are raised and {down:.0%} lowered, by {by:+.3g} nats "
        f"in the mean (limits {SHARE:.0%}, a twentieth of it, {SIZE:g})"
    )
    measured = {"lifted": up, "lowered": down, "lift": by}
    if one_sided or rms_gap(case.record, "logp_sampler", "logp_old") > QUIET:
        return (failed if one_sided else passed)(summary, **measured)
    return _by_surprise(case, summary, measured)


def _lowered(record: StepRecord) -> tuple[float, float]:
    """Return the fractions of lowered tokens among repeated tokens and among the others."""
    if record.prompt_ids is None or record.prompt_offsets is None:
        return 0.0, 0.0
    lift = difference(record, "logp_sampler", "logp_old")
    known = known_tokens(record, "logp_sampler", "logp_old")
    if np.square(lift[known]).sum() < EACH * QUIET**2:  # too little to reach QUIET
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
    """Yield for each token of a row whether it occurs in the prompt or earlier in the row."""
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
    """Return surprise minus entropy (row sums, averaged in groups), and the total entropy.

    Within a row it is a sum of terms whose conditional mean is 0, so lengths do not bias it.
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
    if named.get("top_k") == -1:  # disabled in vLLM
        del named["top_k"]
    return ", ".join(f"{name} {value}" for name, value in named.items())


CHECK = Check(
    name="hidden-sampling-transform",
    stage=Stage.SAMPLER,
    needs=("record.logp_sampler", "record.logp_old", "run.sampling"),
    fix="Sample from the full distribution in training: top_p 1, top_k off, no penalties, and no "
    "config file that sets them (vLLM: generation_config='vllm').",
    judge=judge,
    also=("record.entropy",),
    change={"sampling.top_p": 1.0, "sampling.top_k": 0, "sampling.min_p": 0.0},
    explains=("imprecise-logp", "broken-sampler"),
)
