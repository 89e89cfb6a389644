"""The `kl` section: the KL term to the reference policy; without it there is no reference."""

from typing import Annotated, Literal

from pydantic import model_validator

from klinic.maths.kl_coef import Rule
from klinic.recipe.section import CountOrZero, Section, within

# literal, for editors and type checkers; a test compares it with the registry
EstimatorName = Literal[
    "unbiased",
    "exact",
    "topk",
    "sequence",
    "k1",
    "k2",
    "k3",
    "k3_plus",
    "k3_ratio",
    "k3_reversed",
    "abs",
    "k1_reward",
    "k1_reward_immediate",
    "exp_k1_reward",
]
MULTIPLYING = frozenset({"band", "ziegler", "log_pi"})


class KLSection(Section):
    """Coefficient, estimator and controller of the KL term."""

    coef: Annotated[float, within("a negative one rewards leaving the reference", low=0)] = 0.01
    """Factor of the KL term (beta in papers); 0 trains without it."""
    estimator: EstimatorName = "unbiased"
    """KL estimator; `klinic verify` proves which gradient each one has."""
    controller: Rule = "fixed"
    """How the coefficient changes: fixed, or adapted to keep the KL at `target`."""
    target: Annotated[float, within("it is the mean KL to hold, in nats per token", above=0)] = 0.05
    """Mean KL(policy || reference) that a controller aims for, in nats per token."""
    max_coef: Annotated[float, within("it is the largest coefficient to use", above=0)] = 100.0
    """Upper bound of the coefficient under a controller; staying there raises a warning."""
    warmup_steps: CountOrZero = 0
    """Steps of linear warm-up of the coefficient from 0."""
    rollout_limit: Annotated[float, within("it is a KL in nats", above=0)] | None = None
    """Drop completions whose summed KL to the reference is above this; null drops none."""
    monitor_every: CountOrZero = 0
    """At coefficient 0, steps between KL measurements; 0: never."""

    @property
    def needs_reference(self) -> bool:
        """Whether the run ever scores the reference policy."""
        looks = self.monitor_every > 0 or self.rollout_limit is not None
        return self.coef > 0 or self.controller != "fixed" or looks

    @model_validator(mode="after")
    def _the_controller_can_work(self) -> "KLSection":
        if self.controller == "fixed" and "target" in self.model_fields_set:
            raise ValueError(
                f"kl.target is {self.target} with kl.controller fixed: a fixed coefficient has no "
                "target. Use kl.controller band, ziegler, dual_ascent or log_pi, or remove "
                "kl.target."
            )
        if self.controller in MULTIPLYING and self.coef == 0:
            raise ValueError(
                f"kl.coef is 0 with kl.controller {self.controller}: this controller multiplies "
                "the coefficient, so 0 would stay 0. Start above 0 (0.01 is the default), or use "
                "kl.controller dual_ascent, which adds."
            )
        if self.coef > self.max_coef:
            raise ValueError(
                f"kl.coef is {self.coef} and kl.max_coef {self.max_coef}: the coefficient would "
                "start above its limit. Lower kl.coef or raise kl.max_coef."
            )
        return self
