"""The `recovery` section: what counts as trouble, and how far to go against it.

A loss, a gradient or a weight that is not a number is always trouble. Every other limit is off
until it is given.
"""

from typing import Annotated

from klinic.recipe.section import Count, Section, within


class RecoverySection(Section):
    """Limits of what is well, and how hard to brake. `recovery: null` only discards NaN updates."""

    kl_limit: Annotated[float, within("it is a KL in nats per token", above=0)] | None = None
    """Trouble above this KL(policy || reference), smoothed over five steps; null is none."""
    update_kl_limit: Annotated[float, within("it is a KL in nats per token", above=0)] | None = None
    """KL(new || old) per token above which the updates of a batch end; null is none."""
    grad_norm_limit: (
        Annotated[float, within("a smaller one would stop usual gradients", above=1)] | None
    ) = None
    """Trouble above so many times the 90% quantile of recent gradient norms; null is none."""
    reward_drop: Annotated[float, within("it is a fall of the reward", above=0)] | None = None
    """Trouble when the smoothed reward falls so far below its best, or a batch below all noise."""
    lr_factor: Annotated[
        float, within("the learning rate is multiplied by it", above=0, high=1)
    ] = 0.1
    """What the learning rate is multiplied by after trouble that stays."""
    lr_steps: Count = 50
    """Steps for which it is; again as many each time trouble comes back."""
    max_consecutive: Count = 5
    """Batches in trouble, one after the other, after which the run stops and says why."""
