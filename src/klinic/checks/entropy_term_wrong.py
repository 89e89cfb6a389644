"""entropy-term-wrong: an entropy bonus outweighs the rewards, or has the wrong sign."""

from collections.abc import Sequence

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
from klinic.checks.loss_models import LOSS_FIELDS, LossFit, Sign, identify_loss
from klinic.checks.measures import finite_trained_tokens, float64_column, mean, mean_reward
from klinic.evidence.record import StepRecord
from klinic.evidence.verdict import Verdict

NUM_STEPS = 6  # recent steps: the trend of fewer is chance
MIN_RISE = 1.5  # times the entropy of the first step
MIN_NATS = 0.2  # nats per token: a rise of a tiny entropy is no fault
MIN_RISING_FRACTION = 0.6  # of the steps, higher than the one before
NUM_ERRORS = 2.0  # standard errors by which the reward must have risen to justify it


def judge_case(case: Case) -> Finding:
    """Flag an entropy bonus that outweighs the rewards, or that the loss contains as a cost.

    Looks for
        The sign of the entropy in the recorded loss. The coefficient of the bonus, the entropy of
        the recent steps against the first, and the mean reward.
    Why it matters
        An entropy bonus is a constant pull towards noise. Where it outweighs the advantages, the
        policy forgets what it knew, and the rewards follow only when it is too late. A bonus that
        is added to the minimised loss is a cost: it ends the exploration that it should keep.
    Confirmed when
        The loss of the recent steps contains plus the coefficient times the entropy, within
        rounding, for every form of the other terms that fits. Or there is a bonus, the entropy is
        1.5 times that of the first step and by 0.2 nats above it, it rose in most of the last six
        steps, and the reward is not higher by two standard errors.
    Ruled out when
        There is no bonus. Or the loss contains minus the entropy, and the entropy has not risen,
        or the reward has.
    Confused with
        step-too-big (no bonus; the policy moves too far by its rewards).
    """
    coef = float(case.record.facts["entropy_coef"] or 0)
    if coef <= 0:
        return passed_finding(f"the coefficient of the entropy bonus is {coef:g}")
    fit = identify_loss(case)
    sign = None if fit is None else fit.signs.get("entropy")
    if fit is not None and sign is Sign.WRONG and _is_only_entropy_negated(fit):
        return failed_finding(
            f"{fit.sentence}: the entropy is a cost, so the loss lowers it",
            coef=coef,
            entropy_term=fit.coefs.get("entropy", 0.0),
        )
    rising = _judge_rise(case, coef)
    if rising.verdict is Verdict.PASS and sign is not Sign.RIGHT:
        return no_data_finding(f"{rising.summary}; the loss does not show the sign of the bonus")
    return rising


def _judge_rise(case: Case, coef: float) -> Finding:
    """Flag an entropy that rises under a bonus while the reward does not."""
    records = case.recent_records[-NUM_STEPS:]
    if case.start is None or len(records) < NUM_STEPS:
        return no_data_finding(f"the first step and {NUM_STEPS} later ones are needed")
    first = _mean_entropy(case.start)
    values = [_mean_entropy(record) for record in records]
    if first is None or any(value is None for value in values):
        return no_data_finding("a step has no entropies")
    entropies = np.array(values, dtype=np.float64)
    rising = float((np.diff(entropies) > 0).mean())
    last = float(entropies[-1])
    has_risen = last > MIN_RISE * first and last > first + MIN_NATS
    gain = _reward_gain(case, records[-NUM_STEPS // 2 :])
    is_fault = has_risen and rising > MIN_RISING_FRACTION and gain < NUM_ERRORS
    return (failed_finding if is_fault else passed_finding)(
        f"with a bonus of {coef:g} the entropy went from {first:.3g} to {last:.3g} nats (limit "
        f"{MIN_RISE:g} times), and the reward rose by {gain:.1f} standard errors (limit "
        f"{NUM_ERRORS:g})",
        coef=coef,
        entropy=last,
        gain=gain,
    )


def _is_only_entropy_negated(fit: LossFit) -> bool:
    """Return whether another term has the right sign; else the whole loss may be negated."""
    return Sign.RIGHT in (fit.signs.get("policy"), fit.signs.get("kl"))


def _mean_entropy(record: StepRecord) -> float | None:
    if record.entropy is None:
        return None
    mask = finite_trained_tokens(record, "entropy")
    return mean(float64_column(record, "entropy")[mask]) if mask.any() else None


def _reward_gain(case: Case, records: Sequence[StepRecord]) -> float:
    """Return the gain of the last steps over the first one, in standard errors."""
    assert case.start is not None  # noqa: S101 - checked by the caller
    start = case.measure_once(mean_reward, case.start)
    later = [m for r in records if (m := case.measure_once(mean_reward, r)) is not None]
    if start is None or not later:
        return 0.0
    values, errors = np.array(later).T
    error = np.hypot(start[1], np.sqrt(np.square(errors).sum()) / len(errors))
    return float((values.mean() - start[0]) / max(float(error), 1e-9))


CHECK = Check(
    name="entropy-term-wrong",
    description="an entropy bonus outweighs the rewards, or has the wrong sign",
    stage=Stage.DYNAMICS,
    needs=("facts.entropy_coef", "record.entropy", "record.reward"),
    fix="Subtract the bonus from the minimised loss. If the entropy rises, set its coefficient to "
    "0, or to a tenth; keep exploration by the temperature of sampling instead.",
    judge=judge_case,
    is_of_setup=True,
    explains=("step-too-big", "equal-rewards", "malformed-output"),
    reads=(
        *("facts.learner_version", "facts.kl_coef", "run.estimator"),
        *(field for field in LOSS_FIELDS if field not in ("facts.entropy_coef", "record.entropy")),
    ),
)
