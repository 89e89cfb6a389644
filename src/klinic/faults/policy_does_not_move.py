"""policy-does-not-move: weights are stored in bf16, and updates are lost to rounding.

Second mechanism: the graph is cut after a layer, so earlier adapters have no gradient.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.learner.local import LocalLearner
from klinic.learner.update import LearningRate
from klinic.training import train

RATE_FACTOR = {Severity.MILD: 0.03, Severity.NORMAL: 0.001}  # factor of the learning rate


@contextmanager
def round_weights_to_bf16(severity: Severity) -> Iterator[None]:
    """Load the weights in bf16, and round them after every small update."""

    loaded_policies: list[bool] = []

    def step_and_round(real: Any, self: Any, *args: Any, **options: Any) -> Any:
        loss = real(self, *args, **options)
        if loaded_policies:  # not during the warm start
            _round_to_bf16(p for group in self.param_groups for p in group["params"])
        return loss

    def load_rounded(real: Any, *args: Any) -> Any:
        policy = real(*args)
        _round_to_bf16(policy.lm.parameters())
        loaded_policies.append(True)
        return policy

    def smaller_rate(real: Any, self: Any, num_updates: int) -> float:
        return RATE_FACTOR[severity] * float(real(self, num_updates))

    with ExitStack() as stack:
        stack.enter_context(patch_attribute(torch.optim.AdamW, "step", step_and_round))
        stack.enter_context(patch_attribute(train, "load_start_policy", load_rounded))
        stack.enter_context(patch_attribute(LearningRate, "at", smaller_rate))
        yield


@torch.no_grad()
def _round_to_bf16(parameters: Iterable[Any]) -> None:
    for p in parameters:
        p.copy_(p.bfloat16())


FAULT = Fault(
    cause="policy-does-not-move",
    mechanism="updates below bf16 rounding",
    inject=round_weights_to_bf16,
)


CUT_LAYER = {Severity.MILD: 1, Severity.NORMAL: -1}  # the last layer without a gradient


@contextmanager
def detach_layer_output(severity: Severity) -> Iterator[None]:
    """Block the gradient, as checkpointing does if its inputs require none."""

    def cut_gradient(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.detach() + 0.0 * output if output.requires_grad else output

    def init_with_hook(real: Any, learner: Any, policy: Any, *args: Any, **options: Any) -> None:
        real(learner, policy, *args, **options)
        policy.lm.get_decoder().layers[CUT_LAYER[severity]].register_forward_hook(cut_gradient)

    with patch_attribute(LocalLearner, "__init__", init_with_hook):
        yield


SECOND_FAULT = Fault(
    cause="policy-does-not-move",
    mechanism="the graph is cut, and adapters have no gradient",
    inject=detach_layer_output,
    settings={"model.lora_rank": 8, "learner.learning_rate": 3e-3},
    visible_at_start=True,
)
