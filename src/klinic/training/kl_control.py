"""The KL controller in the loop: which KL measurements it uses, and the notice when it saturates.

A KL is measured before the update of its step. The first measurement that a coefficient influences
is therefore that of the step after the first update with it. Earlier ones are skipped:

- The KL of step 1 is 0 by construction where the policy starts as its reference. It carries no
  information about the coefficient; `log_pi` would lower it, and keep the 0 in its mean. The same
  holds for the step after a reset of the reference.
- During `kl.warmup_steps`, the coefficient in use is not the controller's. The controller would
  attribute the drift under a weak penalty to itself, wind up, and start far too strong.
"""

from dataclasses import dataclass

from klinic.maths.kl_coef import MIN_COEF, KLCoefRule, KLCoefState, update
from klinic.recipe.sections import KLSection
from klinic.training.state import EventFacts

MAX_SATURATED_STEPS = 10  # steps; noise alone rarely keeps a coefficient there for more


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturationNotice:
    """Message and facts of a controller that stays at a bound."""

    message: str
    facts: EventFacts


def controller_rule(kl: KLSection) -> KLCoefRule:
    """Return the controller rule of a recipe."""
    low = min(MIN_COEF, kl.max_coef)
    return KLCoefRule(rule=kl.controller, target=kl.target, low=low, high=kl.max_coef)


def update_kl_coef(
    kl: KLSection | None,
    state: KLCoefState | None,
    measured_kl: float | None,
    *,
    done_steps: int,
    reference_step: int = 0,
) -> KLCoefState | None:
    """Return the controller state after a step's mean k1, in nats per token.

    `done_steps` is the number of steps before this one, whose updates caused the KL;
    `reference_step` is the step after which the reference was last reset to the policy.
    """
    if kl is None or state is None or measured_kl is None:
        return state
    if done_steps <= max(kl.warmup_steps, reference_step):
        return state
    return update(controller_rule(kl), state, measured_kl)


def controller_metrics(kl: KLSection | None, state: KLCoefState | None) -> dict[str, float]:
    """Return the controller's target, and its bound: -1 lower, 0 none, 1 upper."""
    if kl is None or state is None or kl.controller == "fixed":
        return {}
    side = {"low": -1.0, None: 0.0, "high": 1.0}[state.saturated]
    return {"kl_target": kl.target, "kl_coef/saturated": side}


def saturation_notice(
    kl: KLSection | None, before: KLCoefState | None, after: KLCoefState | None, measured_kl: float
) -> SaturationNotice | None:
    """Return the notice of a controller at a bound for too many steps, once per saturation."""
    if kl is None or before is None or after is None:
        return None
    if not before.num_held <= MAX_SATURATED_STEPS < after.num_held:
        return None
    return SaturationNotice(
        message=_saturation_message(kl, after, measured_kl),
        facts={
            "kl_coef": after.coef,
            "bound": after.saturated,
            "num_steps": after.num_held,
            "kl": measured_kl,
            "kl_target": kl.target,
        },
    )


def _saturation_message(kl: KLSection, state: KLCoefState, measured_kl: float) -> str:
    bound, advice = {
        "high": (
            "its upper bound (kl.max_coef)",
            "A stronger penalty would be needed. Raise kl.max_coef or kl.target, or lower "
            "learner.learning_rate.",
        ),
        "low": (
            "its lower bound",
            "The penalty is almost zero, and the KL still stays below the target. Lower kl.target.",
        ),
    }[str(state.saturated)]
    return (
        f"The KL coefficient has been at {state.coef:g}, {bound}, for {state.num_held} steps, and "
        f"the KL is {measured_kl:.4g} nats per token, the target {kl.target:g}. {advice}"
    )
