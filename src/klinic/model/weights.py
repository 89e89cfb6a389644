"""Names for weights: a digest that proves identity, a fingerprint that every step can afford."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SAMPLED = 64  # entries of each tensor in a fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Where weights are and which they are; the tensors themselves stay where they are."""

    version: int
    """Updates that went into them."""
    fingerprint: str
    location: str
    """`process` for weights that sampler and learner share, else a path."""


def whole(tensor: Tensor) -> Tensor:
    """Return all entries of a tensor that may be sharded over processes; all of them must ask."""
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that an optimiser moves, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """Return a hash of evenly spaced entries of every trainable tensor.

    An optimiser moves every entry, so a push that changed nothing shows, for the price of a few
    thousand numbers.
    """
    return sampled_digest(trained(model))


@torch.no_grad()
def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of every entry of the tensors, usually a model's state dict."""
    return _hash(tensors.items())


def sampled(tensor: Tensor) -> Tensor:
    """Return evenly spaced entries of a tensor, 64 to 127 of a large one."""
    return tensor.reshape(-1)[:: max(1, tensor.numel() // SAMPLED)]


@torch.no_grad()
def sampled_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of evenly spaced entries of every tensor."""
    return _hash((name, sampled(whole(p))) for name, p in tensors.items())


def _hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    total = hashlib.sha256()
    for name, tensor in tensors:
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return total.hexdigest()
