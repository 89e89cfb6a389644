"""dropout-in-scoring: the MLP outputs have dropout in training mode."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from klinic.faults.base import Fault, Severity, patched
from klinic.learner.local import LocalLearner

RATE = {Severity.MILD: 0.005, Severity.NORMAL: 0.1}


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Enable dropout after every MLP, in training mode only, as in GPT-2."""

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
    mechanism="dropout after every MLP",
    inject=inject,
    visible_at_start=True,
)
