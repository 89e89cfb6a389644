"""dropout-in-scoring: attention dropout is active while the learner scores.

Second mechanism: the MLP outputs have dropout in training mode.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.learner.local import LocalLearner
from klinic.training import train

ATTENTION_DROPOUT = {Severity.MILD: 0.01, Severity.NORMAL: 0.1}


@contextmanager
def enable_attention_dropout(severity: Severity) -> Iterator[None]:
    """Set the policy's attention dropout after it was validated."""

    def make_learner_with_dropout(
        real: Any, recipe: Any, policy: Any, *rest: Any, **options: Any
    ) -> Any:
        for module in policy.lm.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = ATTENTION_DROPOUT[severity]
        return real(recipe, policy, *rest, **options)

    with patch_attribute(train, "make_learner", make_learner_with_dropout):
        yield


FAULT = Fault(
    cause="dropout-in-scoring",
    mechanism="attention dropout in training mode",
    inject=enable_attention_dropout,
    visible_at_start=True,
)


MLP_DROPOUT = {Severity.MILD: 0.005, Severity.NORMAL: 0.1}


@contextmanager
def enable_mlp_dropout(severity: Severity) -> Iterator[None]:
    """Enable dropout after every MLP, in training mode only, as in GPT-2."""

    def apply_dropout(module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(output, MLP_DROPOUT[severity], training=module.training)

    def init_with_hooks(real: Any, learner: Any, policy: Any, *args: Any, **options: Any) -> None:
        real(learner, policy, *args, **options)
        torch.manual_seed(0)
        for layer in policy.lm.get_decoder().layers:
            layer.mlp.register_forward_hook(apply_dropout)

    with patch_attribute(LocalLearner, "__init__", init_with_hooks):
        yield


SECOND_FAULT = Fault(
    cause="dropout-in-scoring",
    mechanism="dropout after every MLP",
    inject=enable_mlp_dropout,
    visible_at_start=True,
)
