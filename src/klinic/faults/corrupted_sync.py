"""corrupted-sync: the sampler unpacks a tensor in the wrong order.

Second mechanism: one of two shards of a tensor never arrives.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.model.weights import fingerprint
from klinic.sampler.protocol import LoadResult
from klinic.training import train

WRONG_ORDER = {Severity.MILD: "layers.0.self_attn.v_proj", Severity.NORMAL: "v_proj"}
LOST_SHARD = {Severity.MILD: "mlp.down_proj", Severity.NORMAL: "mlp."}
"""What the names of the damaged tensors contain."""


@contextmanager
def _damage_tensors(pattern: str, damage: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Give the sampler its own weights, and damage those whose name contains `pattern`."""

    def make_separate_sampler(real: Any, recipe: Any, policy: Any, *args: Any) -> Any:
        own_policy = replace(policy, scorer=copy.deepcopy(policy.scorer))
        sampler = real(recipe, own_policy, *args)
        load = sampler.load

        @torch.no_grad()
        def load_damaged(weights: Any) -> LoadResult:
            own_policy.lm.load_state_dict(policy.lm.state_dict())
            for name, parameter in own_policy.lm.named_parameters():
                if pattern in name:
                    parameter.copy_(damage(parameter.clone()))
            load(weights)
            return LoadResult(fingerprint=fingerprint(own_policy.lm))

        sampler.load = load_damaged
        return sampler

    with patch_attribute(train, "make_sampler", make_separate_sampler):
        yield


@contextmanager
def reverse_rows(severity: Severity) -> Iterator[None]:
    """Reverse the rows of a projection."""
    with _damage_tensors(WRONG_ORDER[severity], lambda tensor: tensor.flip(0)):
        yield


FAULT = Fault(
    cause="corrupted-sync",
    mechanism="rows of a projection arrive in the wrong order",
    inject=reverse_rows,
    visible_at_start=True,
)


@contextmanager
def lose_second_shard(severity: Severity) -> Iterator[None]:
    """Leave the second half of the columns at 0."""

    def zero_half(tensor: Tensor) -> Tensor:
        tensor[:, tensor.shape[1] // 2 :] = 0
        return tensor

    with _damage_tensors(LOST_SHARD[severity], zero_half):
        yield


SECOND_FAULT = Fault(
    cause="corrupted-sync",
    mechanism="the second shard of a tensor never arrives",
    inject=lose_second_shard,
    visible_at_start=True,
)
