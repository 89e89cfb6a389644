"""A batch scored by policy and reference: the state between `score` and the updates of a step."""

from dataclasses import dataclass, field

from torch import Tensor

from klinic.learner.objective import LossTargets
from klinic.learner.step_rows import StepRows
from klinic.model.scorer import RefHidden


@dataclass(slots=True, kw_only=True)
class ScoredBatch(StepRows):
    """A batch scored by policy and reference before its updates."""

    targets: LossTargets
    ref_hidden: list[RefHidden | None]
    """The reference's hidden states, or a sample of them, per micro-batch."""
    teacher_hidden: list[RefHidden | None] = field(default_factory=list)
    """The same of the teacher; empty without one."""
    logp_start: Tensor | None = None
    """Log-probs under the initial policy, on diagnostic steps of a moving reference."""
    reference_fingerprint: str | None = None
    """Fingerprint of the reference's current weights."""
    teacher_fingerprint: str | None = None
