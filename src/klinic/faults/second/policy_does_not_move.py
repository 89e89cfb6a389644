"""policy-does-not-move: the graph is cut after a layer, so earlier adapters have no gradient."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from klinic.faults.base import Fault, Severity, patched
from klinic.learner.local import LocalLearner

CUT = {Severity.MILD: 1, Severity.NORMAL: -1}  # the last layer without a gradient


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Block the gradient, as checkpointing does if its inputs require none."""

    def cut(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.detach() + 0.0 * output if output.requires_grad else output

    def made(real: Any, learner: Any, policy: Any, *args: Any, **how: Any) -> None:
        real(learner, policy, *args, **how)
        policy.lm.get_decoder().layers[CUT[severity]].register_forward_hook(cut)

    with patched(LocalLearner, "__init__", made):
        yield


FAULT = Fault(
    cause="policy-does-not-move",
    mechanism="the graph is cut, and adapters have no gradient",
    inject=inject,
    settings={"model.lora_rank": 8, "learner.learning_rate": 3e-3},
    visible_at_start=True,
)
