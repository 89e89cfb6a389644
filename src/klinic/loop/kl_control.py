"""The controller in the loop: which KL it acts on, and what it says when it can do no more.

A KL is measured before the update of its step. So the first one that a coefficient had a say in is
that of the step after the first update made with it. Earlier ones are left out:

- The KL of step 1 is 0 by construction where the policy starts as its reference. That says nothing
  about the coefficient, and `log_pi` would lower it, and remember the 0 in its mean.
- While `kl.warmup_steps` last, the coefficient in use is not the controller's. It would take the
  drift under a weak tie for its own fault, wind up, and start far too strong.
"""

from dataclasses import dataclass
from typing import Any

from klinic.maths.kl_coef import LOWEST, KLCoefRule, KLCoefState, update
from klinic.recipe.kl import KLSection

LONGEST_STAY = 10  # steps; log_pi smooths over about ten, so a stay that long is no noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A controller that has been at a bound for long."""

    sentence: str
    facts: dict[str, Any]


def rule_of(kl: KLSection) -> KLCoefRule:
    """Return the rule that a recipe asks for."""
    low = min(LOWEST, kl.max_coef)
    return KLCoefRule(rule=kl.controller, target=kl.target, low=low, high=kl.max_coef)


def adapted(
    kl: KLSection | None, before: KLCoefState | None, measured: float | None, *, done_steps: int
) -> KLCoefState | None:
    """Return the controller's state after a step's mean k1, in nats per token.

    `done_steps` are those before the step: the updates that the KL is the result of.
    """
    if kl is None or before is None or measured is None or done_steps <= kl.warmup_steps:
        return before
    return update(rule_of(kl), before, measured)


def controller_metrics(kl: KLSection | None, state: KLCoefState | None) -> dict[str, float]:
    """Return what a controller steers to, and at which bound it is: -1, 0 for none, 1."""
    if kl is None or state is None or kl.controller == "fixed":
        return {}
    side = {"low": -1.0, None: 0.0, "high": 1.0}[state.saturated]
    return {"kl_target": kl.target, "kl_coef/saturated": side}


def held(
    kl: KLSection | None, before: KLCoefState | None, after: KLCoefState | None, kl_now: float
) -> Held | None:
    """Return what to say in the step in which a stay at a bound becomes long; once a stay."""
    if kl is None or before is None or after is None:
        return None
    if not before.num_held <= LONGEST_STAY < after.num_held:
        return None
    return Held(
        sentence=_sentence(kl, after, kl_now),
        facts={
            "kl_coef": after.coef,
            "bound": after.saturated,
            "num_steps": after.num_held,
            "kl": kl_now,
            "kl_target": kl.target,
        },
    )


def _sentence(kl: KLSection, state: KLCoefState, kl_now: float) -> str:
    where, what_to_do = {
        "high": (
            "its upper bound (kl.max_coef)",
            "A stronger tie would be needed. Raise kl.max_coef or kl.target, or lower "
            "learner.learning_rate.",
        ),
        "low": (
            "its lower bound",
            "Hardly a tie is left, and still the policy does not go that far. Lower kl.target.",
        ),
    }[str(state.saturated)]
    return (
        f"The KL coefficient is held at {state.coef:g}, {where}, for {state.num_held} steps, and "
        f"the KL is {kl_now:.4g} nats per token where {kl.target:g} is the target. {what_to_do}"
    )
