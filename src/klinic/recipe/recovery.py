"""The `recovery` section: limits that define an anomaly, and the response.

A non-finite loss, gradient or weight is always an anomaly. Every other limit is off by default.
"""

from typing import Annotated

from klinic.recipe.section import Count, Section, within


class RecoverySection(Section):
    """Anomaly limits and back-off. `recovery: null` only discards non-finite updates."""

    kl_limit: Annotated[float, within("it is a KL in nats per token", above=0)] | None = None
    """Anomaly above this KL(policy || reference), smoothed over five steps; null: no limit."""
    update_kl_limit: Annotated[float, within("it is a KL in nats per token", above=0)] | None = None
    """KL(new || old) per token above which the updates on a batch stop; null: no limit."""
    grad_norm_limit: (
        Annotated[float, within("a smaller one would stop usual gradients", above=1)] | None
    ) = None
    """Anomaly above this multiple of the 90% quantile of recent gradient norms; null: no limit."""
    reward_drop: Annotated[float, within("it is a fall of the reward", above=0)] | None = None
    """Anomaly if the smoothed reward falls this far below its best, or a batch below its noise."""
    lr_factor: Annotated[
        float, within("the learning rate is multiplied by it", above=0, high=1)
    ] = 0.1
    """Factor of the learning rate after an anomaly that a retry does not clear."""
    lr_steps: Count = 50
    """Steps for which the factor applies; each further anomaly adds as many."""
    max_consecutive: Count = 5
    """Consecutive anomalous batches after which the run stops with a diagnosis."""
