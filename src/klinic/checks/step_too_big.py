"""step-too-big: every part is right and the policy moves too far in a step."""

from dataclasses import replace

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import gap, mean, mean_reward, median

FAR = 0.3  # nats per token to the reference, where rewards have fallen
FELL = 4.0  # standard errors by which the reward is below that of the first step
FAR_FOR_NOTHING = 1.0  # nats per token: learning that goes so far shows in the reward
GAINED = 2.0  # standard errors by which the reward of the last steps is above the first
STEPS = 3  # last steps whose rewards are averaged there
MEDIAN = 0.02  # nats: not a few tokens but the policy has moved


def judge(case: Case) -> Finding:
    """Flag a policy that runs away from its reference and earns less for it.

    Looks for
        k1 to the reference, its median, and the reward, against the first step.
    Why it matters
        Too large a rate, too small a coefficient, an entropy bonus: the KL rises smoothly and then
        fast, rewards fall, and completions turn into noise.
    Confirmed when
        k1 is above 0.3 nats per token and not by a few tokens, and the reward is four standard
        errors below that of the first step; or k1 is above 1 and three steps earned no more.
    Ruled out when
        The KL is small, or it is high and the reward is not lower: that is learning. Where the
        reward fell, nobody was paid for it: that is no reward-hacking.
    Confused with
        everything else: it is named only where what could explain it was ruled out;
        reward-hacking (the reward rises).
    """
    if case.start is None or case.version == 0:
        return no_data("the step before the first update, and one behind it, are needed")
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
    """Return the standard errors by which the last steps earned more than the first."""
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
    fix="Lower the learning rate, raise or adapt kl.coef, drop an entropy bonus, and let recovery "
    "roll back.",
    judge=judge,
    change={"kl.controller": "log_pi", "recovery": {}},
    explains=("kl-tail-dominates", "equal-rewards"),
)
