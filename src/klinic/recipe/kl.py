"""The `kl` section: the tie to the reference policy. Without it there is neither."""

from typing import Annotated, Literal

from pydantic import model_validator

from klinic.maths.kl_coef import Rule
from klinic.recipe.section import CountOrZero, Section, within

# spelt out, so that editors and type checkers know the names; a test holds it to the registry
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
    """How strongly, and by which term, the policy is held to the reference."""

    coef: Annotated[float, within("a negative one rewards leaving the reference", low=0)] = 0.01
    """What the KL term is multiplied by (papers: beta); 0 trains without it."""
    estimator: EstimatorName = "unbiased"
    """Which KL term; `klinic verify` proves what each name differentiates."""
    controller: Rule = "fixed"
    """How the coefficient moves: it stays, or it steers the KL to `target`."""
    target: Annotated[float, within("it is the mean KL to hold, in nats per token", above=0)] = 0.05
    """Mean KL(policy || reference) that a controller holds, in nats per token."""
    max_coef: Annotated[float, within("it is the largest coefficient to use", above=0)] = 100.0
    """Where a controller ends; one that is held there for long says so."""
    warmup_steps: CountOrZero = 0
    """Steps in which the coefficient rises from 0 to its value."""
    rollout_limit: Annotated[float, within("it is a KL in nats", above=0)] | None = None
    """Leave out completions whose summed KL to the reference is above it; null leaves out none."""
    monitor_every: CountOrZero = 0
    """At coefficient 0, measure the KL every so many steps; 0 is never."""

    @property
    def needs_reference(self) -> bool:
        """Whether anything is ever compared with the reference."""
        looks = self.monitor_every > 0 or self.rollout_limit is not None
        return self.coef > 0 or self.controller != "fixed" or looks

    @model_validator(mode="after")
    def _the_controller_can_work(self) -> "KLSection":
        if self.controller == "fixed" and "target" in self.model_fields_set:
            raise ValueError(
                f"kl.target is {self.target} with kl.controller fixed: a fixed coefficient steers "
                "to no target. Use kl.controller band, ziegler, dual_ascent or log_pi, or leave "
                "kl.target out."
            )
        if self.controller in MULTIPLYING and self.coef == 0:
            raise ValueError(
                f"kl.coef is 0 with kl.controller {self.controller}: it multiplies the "
                "coefficient, and 0 would stay 0. Start above 0 (0.01 is the default), or use "
                "kl.controller dual_ascent, which adds."
            )
        if self.coef > self.max_coef:
            raise ValueError(
                f"kl.coef is {self.coef} and kl.max_coef {self.max_coef}: it would start above its "
                "own limit. Lower one or raise the other."
            )
        return self
