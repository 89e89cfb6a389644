"""step-too-big: every component is correct and the policy moves too far in a step."""

from dataclasses import replace

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import gap, mean, mean_reward, median

FAR = 0.3  # nats per token to the reference, if rewards have fallen
FELL = 4.0  # standard errors by which the reward is below that of the first step
FAR_FOR_NOTHING = 1.0  # nats per token: learning that moves so far raises the reward
GAINED = 2.0  # standard errors by which the reward of the last steps is above the first
STEPS = 3  # last steps whose rewards are averaged
MEDIAN = 0.02  # nats: the whole policy has moved, not a few tokens


def judge(case: Case) -> Finding:
    """Flag a policy that drifts away from its reference while its reward falls.

    Looks for
        k1 to the reference, its median, and the reward, against the first step.
    Why it matters
        Too large a learning rate, too small a coefficient, an entropy bonus: the KL rises
        slowly and then fast, rewards fall, and completions turn into noise.
    Confirmed when
        k1 is above 0.3 nats per token and not because of a few tokens, and the reward is four
        standard errors below that of the first step; or k1 is above 1 and three steps show no
        higher reward.
    Ruled out when
        The KL is small, or it is high and the reward is not lower: that is learning. A reward
        that fell excludes reward-hacking.
    Confused with
        everything else: it is named only if every cause that could explain it is ruled out;
        reward-hacking (the reward rises).
    """
    if case.start is None or case.version == 0:
        return no_data("the step before the first update and one after it are needed")
    k1 = gap(case.record, "logp_old", "logp_ref")
    first, now = case.of(mean_reward, case.start), case.of(mean_reward, case.record)
    if not k1.size or first is None or now is None:
        return no_data("no trained tokens, or too few groups with a reward")
    apart, middle = mean(k1), median(np.abs(k1))
    error = float(np.hypot(first[1], now[1]))
    fell = (first[0] - now[0]) / max(error, 1e-9)
    gained = _gained(case, first)
    for_nothing = apart > FAR_FOR_NOTHING and gained is not None and gained < GAINED
    wrong = middle > MEDIAN and ((apart > FAR and fell > FELL) or for_nothing)
    summary = (
        f"k1 to the reference is {apart:.3g} nats per token (limit {FAR:g}) and the reward went "
        f"from {first[0]:.3g} to {now[0]:.3g}: {fell:.1f} standard errors down (limit {FELL:g})"
    )
    found = (failed if wrong else passed)(summary, kl=apart, fell=fell)
    return replace(found, never_by=("reward-hacking",)) if fell > FELL else found


def _gained(case: Case, first: tuple[float, float]) -> float | None:
    """Return the gain in reward of the last steps over the first, in standard errors."""
    known = [case.of(mean_reward, record) for record in case.window[-STEPS:]]
    last = [reward for reward in known if reward is not None]
    if len(last) < STEPS or case.window[-STEPS].facts.get("learner_version") == 0:
        return None
    earned = float(np.mean([reward for reward, _ in last]))
    error = float(np.hypot(first[1], np.mean([e for _, e in last]) / np.sqrt(STEPS)))
    return (earned - first[0]) / max(error, 1e-9)


CHECK = Check(
    name="step-too-big",
    stage=Stage.DYNAMICS,
    needs=("record.logp_old", "record.logp_ref", "record.reward", "facts.learner_version"),
    fix="Lower the learning rate, raise or adapt kl.coef, remove an entropy bonus, and enable "
    "recovery to roll back.",
    judge=judge,
    change={"kl.controller": "log_pi", "recovery": {}},
    explains=("kl-tail-dominates", "equal-rewards"),
)
