"""unnormalised-logp: log-probs or entropies that no distribution has."""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
)
from klinic.checks.gap_models import GapFit, GapModel, compete_on_sampler_gap
from klinic.checks.measures import finite_trained_tokens, float64_column, has_older_samples
from klinic.evidence.record import StepRecord

TOLERANCE_FP32 = 1e-3  # nats: a logit minus a logsumexp, both of size 100, in fp32 or TF32
TOLERANCE_BF16 = 0.5  # nats: the same in bf16, which rounds a logit of 100 by up to 0.25
COLUMNS = ("logp_sampler", "logp", "logp_old", "logp_ref")


def judge_case(case: Case) -> Finding:
    """Flag log-probs that cannot be those of a normalised distribution.

    Looks for
        Log-probs above 0, on each side; entropies below 0 or above that of a uniform choice among
        twice the vocabulary; tokens of rank r with a log-prob above -log(r + 1), though r
        others are likelier; and a gap between sampler and learner that is a function of the
        entropy alone, as of log-probs that were divided by a temperature after the softmax.
    Why it matters
        The normaliser is wrong: a fused kernel that counts columns outside the vocabulary, a
        vocabulary shard that is left out, logits instead of log-probs. Ratios and KL are then
        arbitrary, and the loss looks ordinary.
    Confirmed when
        A single trained token violates a bound by more than rounding (0.001 nats in fp32, 0.5 in
        bf16); or the entropy explains nine tenths of a gap that goes one way.
    Ruled out when
        All recorded values are within their bounds.
    Confused with
        imprecise-logp (small noise within the bounds); misaligned-logp (each value is that of
        another token); nan-outside-mask (values that are not finite).
    """
    record = case.record
    policy = case.run.get("policy")
    is_fp32 = isinstance(policy, Mapping) and policy.get("dtype") == "fp32"
    tolerance = TOLERANCE_FP32 if is_fp32 else TOLERANCE_BF16
    bounds = list(_excesses(record, case.run.get("vocabulary_size")))
    if not bounds:
        return no_data_finding("no trained token has a finite log-prob")
    if (divided := _divided(case)) is not None:
        return failed_finding(
            f"the gap between sampler and learner is {divided.value:+.2f} times the entropy, which "
            f"explains {divided.explained:.0%} of it: log-probs of one side were divided by a "
            "temperature after the softmax",
            explained=divided.explained,
        )
    name, excess = max(bounds, key=lambda bound: bound[1])
    summary = f"{name} by {excess:.3g} nats at most (limit {tolerance:g})"
    return (failed_finding if excess > tolerance else passed_finding)(summary, excess=excess)


def _divided(case: Case) -> GapFit | None:
    """Return the explanation of the gap by divided log-probs, if it is the best one."""
    if case.record.logp_sampler is None or has_older_samples(case.record):
        return None
    winner = case.measure_once(compete_on_sampler_gap, case.record).winner
    return winner if winner is not None and winner.model is GapModel.DIVIDED else None


def _excesses(record: StepRecord, vocabulary_size: int | None) -> Iterator[tuple[str, float]]:
    """Yield each bound and the largest value above it; negative if all values are below."""
    for name in COLUMNS:
        if (values := _trained_values(record, name)).size:
            yield f"`{name}` exceeds 0", float(values.max())
    if (entropy := _trained_values(record, "entropy")).size:
        yield "`entropy` is below 0", -float(entropy.min())
        # twice: columns that only pad the vocabulary count too
        most = math.log(2 * vocabulary_size) if vocabulary_size else math.inf
        yield "`entropy` exceeds twice as many equal choices", float(entropy.max()) - most
    if record.rank is not None and (values := _trained_values(record, "logp")).size:
        ranks = np.maximum(record.rank[finite_trained_tokens(record, "logp")], 0)
        above = values + np.log1p(ranks)
        yield "`logp` exceeds what its `rank` allows", float(above.max())


def _trained_values(record: StepRecord, name: str) -> np.ndarray:
    """Return the finite values of a column on trained tokens; empty if it is not recorded."""
    if getattr(record, name) is None:
        return np.empty(0)
    values: np.ndarray = float64_column(record, name)[finite_trained_tokens(record, name)]
    return values


CHECK = Check(
    name="unnormalised-logp",
    description="log-probs or entropies that no distribution has",
    stage=Stage.ALIGNMENT,
    needs=("record.logp_old",),
    fix="Compute log-probs as logits minus the logsumexp over the whole vocabulary, without padded "
    "columns and over all shards; compare a fused kernel with log_softmax in fp32. Divide logits, "
    "never log-probs, by a temperature.",
    judge=judge_case,
    explains=(
        *("imprecise-logp", "temperature-on-one-side", "hidden-sampling-transform"),
        *("wrong-reference", "stale-sampler", "stale-prefix-cache", "unexplained-gap"),
        *("kl-tail-dominates", "step-too-big", "misaligned-logp", "layout-changes-logp"),
        *("broken-sampler", "random-weights"),
        "gap-grows-with-position",
        "corrupted-sync",
    ),
    reads=(
        "record.loss_mask",
        "record.logp",
        "record.logp_ref",
        "record.logp_sampler",
        "record.entropy",
        "record.rank",
        "run.policy",
        "run.vocabulary_size",
    ),
)
