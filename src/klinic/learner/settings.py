"""Settings of a learner other than its objective: optimization, micro-batches, packing."""

from dataclasses import dataclass

from klinic.learner.objective import Objective
from klinic.learner.update import LearningRate
from klinic.model.token_filters import NO_FILTERS, TokenFilters


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """Settings of the learner other than its objective."""

    learning_rate: LearningRate
    weight_decay: float
    adam_betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float
    micro_batch_size: int
    updates_per_batch: int
    packed: bool = False
    filters: TokenFilters = NO_FILTERS
    """The sampler's filters, which scoring applies too."""

    def stores_top_k(self, objective: Objective) -> bool:
        """Whether the reference's top-k log-probs are stored, not recomputed in every update."""
        return objective.estimator == "topk" and self.updates_per_batch > 1
