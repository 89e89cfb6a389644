"""kl-controller-reversed: the controller of the KL coefficient moves it the wrong way."""

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
from klinic.checks.measures import finite_trained_tokens, float64_column, mean
from klinic.evidence.record import StepRecord
from klinic.maths import kl

MIN_CHANGES = 6  # of the coefficient, at a KL that is clearly on one side of the target
MIN_SIDE_CHANGES = 3  # upwards, and as many downwards, if the target is unknown
CLEAR = 0.1  # of the target: nearer to it either way is right
MIN_REVERSED = 0.9  # of the changes: a controller with a memory may lag behind a few
MIN_CHANGE = 1e-6  # of the coefficient


def judge_case(case: Case) -> Finding:
    """Flag a controller that lowers the coefficient while the KL is too high.

    Looks for
        The changes of the coefficient from step to step, and the KL of the step before each. With
        a declared target, where the KL moves away from it: whether they have the sign of its
        distance. Without one: rises while the KL falls, and falls while it rises; a controller,
        also one that follows the slope, makes the first above its target and the second below.
    Why it matters
        The penalty fades just when it is needed, and grows where the policy does not move: the
        KL runs away, and the log shows a controller at work.
    Confirmed when
        Nine of ten changes have the wrong sign, of six or more; or, without a target, there are
        three such rises and three such falls, and every rise comes at a lower KL than any fall.
    Ruled out when
        Fewer have, or the coefficient does not change.
    Confused with
        state-lost (the coefficient jumps back once); step-too-big (the coefficient rises, and
        the KL rises all the same).
    """
    records = [r for r in case.recent_records if isinstance(r.facts.get("kl_coef"), int | float)]
    coefs = np.array([float(r.facts["kl_coef"] or 0.0) for r in records])
    values = np.array([case.measure_once(_mean_kl, r) for r in records])
    steps, slopes = np.diff(coefs)[1:], np.diff(values)[:-1]
    size, values = np.maximum(np.abs(coefs[1:-1]), 1e-12), values[1:-1]
    used = (np.abs(steps) > MIN_CHANGE * size) & np.isfinite(values) & np.isfinite(slopes)
    if len(records) > MIN_CHANGES and not used.any():
        return passed_finding("the coefficient does not change")
    steps, slopes, values = steps[used], slopes[used], values[used]
    target = case.run.get("kl_target")
    if isinstance(target, int | float) and target > 0:
        moves_away = slopes * (values - target) > 0
        return _judge_by_target(steps[moves_away], values[moves_away], float(target))
    return _judge_by_order(values[(steps > 0) & (slopes < 0)], values[(steps < 0) & (slopes > 0)])


def _judge_by_target(steps: np.ndarray, values: np.ndarray, target: float) -> Finding:
    clear = np.abs(values / target - 1) > CLEAR
    if clear.sum() < MIN_CHANGES:
        return no_data_finding(
            f"{clear.sum()} changes at a KL that moves away from the target, {MIN_CHANGES} needed"
        )
    reversed_fraction = float((np.sign(steps) != np.sign(values - target))[clear].mean())
    summary = (
        f"{reversed_fraction:.0%} of {clear.sum()} changes of the coefficient are away from the "
        f"target of {target:g} nats (limit {MIN_REVERSED:.0%}); the KL is {values[-1]:.3g}"
    )
    is_fault = reversed_fraction >= MIN_REVERSED
    return (failed_finding if is_fault else passed_finding)(summary, reversed=reversed_fraction)


def _judge_by_order(rises: np.ndarray, falls: np.ndarray) -> Finding:
    if min(len(rises), len(falls)) < MIN_SIDE_CHANGES:
        return no_data_finding(
            f"no target is declared, and the coefficient rises {len(rises)} times while the KL "
            f"falls and falls {len(falls)} times while it rises ({MIN_SIDE_CHANGES} of each needed)"
        )
    summary = (
        f"the coefficient rises at a falling KL of {rises.min():.3g} to {rises.max():.3g} nats and "
        f"falls at a rising one of {falls.min():.3g} to {falls.max():.3g}"
    )
    if rises.max() < falls.min():
        return failed_finding(f"{summary}: the wrong way round", rises=float(rises.max()))
    return passed_finding(summary, rises=float(rises.max()))


def _mean_kl(record: StepRecord) -> float:
    """Return the mean k1 of a step, which most controllers hold; else the logged KL, or NaN."""
    if record.logp_ref is not None and record.logp_old is not None:
        used = finite_trained_tokens(record, "logp_old", "logp_ref")
        if used.any():
            logp_p, logp_q = (float64_column(record, n)[used] for n in ("logp_old", "logp_ref"))
            return mean(np.asarray(kl.k1(logp_p=logp_p, logp_q=logp_q)))
    logged = record.facts.get("kl_logged")
    return float(logged) if isinstance(logged, int | float) else float("nan")


CHECK = Check(
    name="kl-controller-reversed",
    description="the controller of the KL coefficient moves it the wrong way",
    stage=Stage.WIRING,
    needs=("facts.kl_coef",),
    fix="Raise the coefficient where the KL is above its target and lower it below: multiply it by "
    "1 + rate * clip(kl / target - 1, -0.2, 0.2).",
    judge=judge_case,
    is_of_setup=True,
    explains=("step-too-big", "kl-tail-dominates", "reward-hacking", "equal-rewards"),
    reads=(
        "record.logp_old",
        "record.logp_ref",
        "record.loss_mask",
        "facts.kl_logged",
        "run.kl_target",
    ),
)
