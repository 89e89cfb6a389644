"""AdamW, a stateless learning-rate schedule, and gradient clipping."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from klinic.model.weights import full_tensor

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """The learning rate as a function of the update; it has no state that a resume could lose."""

    peak: float
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    total_steps: int

    def at(self, num_updates: int) -> float:
        """Return the learning rate after `num_updates` updates.

        >>> rate = LearningRate(peak=1.0, schedule="linear", warmup_steps=2, total_steps=6)
        >>> [rate.at(n) for n in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
        """
        if num_updates < self.warmup_steps:
            return self.peak * (num_updates + 1) / self.warmup_steps
        decay_steps = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (num_updates - self.warmup_steps) / decay_steps)
        match self.schedule:
            case "constant":
                return self.peak
            case "linear":
                return self.peak * (1 - progress)
            case "cosine":
                return self.peak * (1 + math.cos(math.pi * progress)) / 2


def make_optimizer(
    model: nn.Module, *, weight_decay: float, betas: tuple[float, float] = (0.9, 0.999)
) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters; norms and biases do not decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def total_norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all entries together."""
    return float(full_tensor(torch.nn.utils.get_total_norm(list(tensors))))


def tensors_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every entry is finite.

    A sum runs at memory bandwidth and is finite only if all entries are. It can overflow for large
    entries: if it is not finite, or if tensors are sharded, the largest entry decides.
    """
    return groups_finite({"all": list(tensors)})["all"]


def groups_finite(groups: Mapping[str, Sequence[Tensor]]) -> dict[str, bool]:
    """Whether every entry of each group of tensors is finite; the host waits once for all."""
    sums = {
        name: [_wide_sum(tensor) for tensor in tensors]
        for name, tensors in groups.items()
        if not any(isinstance(tensor, DTensor) for tensor in tensors)
    }
    numbers = read_numbers([total for group in sums.values() for total in group])
    names = [name for name, group in sums.items() for _ in group]
    overflown = {
        name for name, number in zip(names, numbers, strict=True) if not math.isfinite(number)
    }
    return {
        name: (name in sums and name not in overflown) or _largest_is_finite(tensors)
        for name, tensors in groups.items()
    }


def read_numbers(tensors: Sequence[Tensor]) -> list[float]:
    """Return tensors of one entry as numbers; the host waits once for each device."""
    numbers = [0.0] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        places = [place for place, tensor in enumerate(tensors) if tensor.device == device]
        stacked = torch.stack([tensors[place].detach().double() for place in places])
        for place, number in zip(places, stacked.tolist(), strict=True):
            numbers[place] = number
    return numbers


def _wide_sum(tensor: Tensor) -> Tensor:
    return tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))


def _largest_is_finite(tensors: Sequence[Tensor]) -> bool:
    largest = torch.nn.utils.get_total_norm(list(tensors), norm_type=math.inf)
    return bool(torch.isfinite(full_tensor(largest)))


def clip_gradients(gradients: Iterable[Tensor], *, grad_norm: float, max_norm: float) -> float:
    """Scale the gradients down to `max_norm` where they exceed it; return their norm afterwards."""
    if grad_norm <= max_norm:
        return grad_norm
    for gradient in gradients:
        gradient.mul_(max_norm / grad_norm)
    return max_norm
