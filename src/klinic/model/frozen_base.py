"""Store the frozen weights under an adapter in bf16 where bf16 holds them exactly.

That is so for a model published in bf16. Its linear layers and its embedding then take half the
memory, and nothing else changes: products under autocast are bitwise the same, and so are fp32
passes, digests and merged exports. Norms, the head and the adapter stay in fp32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from klinic.model.adapters import has_adapter, has_only_low_rank


class Bf16Linear(nn.Linear):
    """A linear layer in bf16; outside autocast it computes in its input's dtype."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the product, in bf16 under autocast."""
        if torch.is_autocast_enabled(hidden.device.type):
            return super().forward(hidden)
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        return functional.linear(hidden, self.weight.to(hidden.dtype), bias)


class Bf16Embedding(nn.Embedding):
    """A frozen embedding stored in bf16; its states are fp32, as are those that layers add."""

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the states of token ids in fp32."""
        return super().forward(token_ids).float()


STORED_AS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: Bf16Linear,
    nn.Embedding: Bf16Embedding,
}


def compute_in_input_dtype(module: nn.Linear) -> None:
    """Make a linear layer whose weights may be in bf16 compute in its input's dtype."""
    if type(module) is nn.Linear:
        module.__class__ = Bf16Linear


def store_base_in_bf16(lm: Any, *, is_exact: Callable[[Tensor], bool] | None = None) -> None:
    """Store the frozen linear layers and the embedding of a decoder in bf16 where that is exact.

    Only below a low-rank adapter: a model that is trained itself keeps its fp32 weights. Other
    layers with weights, such as fused experts or GPT-2's transposed matrices, stay in fp32,
    and so does an embedding that is the head as well. `is_exact` answers for weights without
    values.
    """
    if not (has_adapter(lm) and has_only_low_rank(lm)):
        return
    is_exact = is_exact or _is_exact_in_bf16
    head = lm.get_output_embeddings()
    for module in lm.get_decoder().modules():
        stored_as = STORED_AS.get(type(module))
        if stored_as is None or module.weight is head.weight:
            continue
        if all(not p.requires_grad and is_exact(p) for p in module.parameters()):
            _convert(module, stored_as)


def _convert(module: nn.Module, stored_as: type[nn.Module]) -> None:
    """Round a module's weights in place; other modules keep their references to it."""
    module.to(torch.bfloat16)
    module.__class__ = stored_as


@torch.no_grad()
def _is_exact_in_bf16(weight: Tensor) -> bool:
    # by rows, so that no second copy of a large weight is made
    parts = torch.split(weight, 4096)
    return all(torch.equal(part, part.to(torch.bfloat16).float()) for part in parts)
