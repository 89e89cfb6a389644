"""dropout-in-scoring: what the layers add to the stream is dropped at random while training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from klinic.faults.base import Fault, Severity, patched
from klinic.learner.local import LocalLearner

RATE = {Severity.MILD: 0.005, Severity.NORMAL: 0.1}


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Leave the dropout behind every MLP on, in training mode alone, as GPT-2 has it."""

    def dropped(module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(output, RATE[severity], training=module.training)

    def made(real: Any, learner: Any, policy: Any, *args: Any, **how: Any) -> None:
        real(learner, policy, *args, **how)
        torch.manual_seed(0)
        for layer in policy.lm.get_decoder().layers:
            layer.mlp.register_forward_hook(dropped)

    with patched(LocalLearner, "__init__", made):
        yield


FAULT = Fault(
    cause="dropout-in-scoring",
    mechanism="dropout behind every MLP",
    inject=inject,
    visible_at_start=True,
)
