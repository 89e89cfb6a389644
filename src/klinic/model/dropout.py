"""Force every dropout to 0: a log-prob must be a function of weights and tokens.

Eval mode would do it too, but it also switches gradient checkpointing off without a word.
"""

import torch
from torch import nn

from klinic.errors import ConfigError


def silence_dropout(model: nn.Module) -> None:
    """Set the rate of every dropout in the model to 0, modules and plain numbers alike."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def largest_dropout(model: nn.Module) -> float:
    """Return the largest rate of any dropout in the model."""
    rates = [
        float(value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float)
        and ("drop" in name or (name == "p" and isinstance(module, nn.modules.dropout._DropoutNd)))
    ]
    return max(rates, default=0.0)


def refuse_randomness(first: torch.Tensor, second: torch.Tensor, name: str) -> None:
    """Refuse a model whose forward gave two answers to one question."""
    if not (torch.isfinite(first).all() and torch.isfinite(second).all()):
        raise ConfigError(
            f"model.name is {name}: its hidden states are not numbers, so some of its weights are "
            "NaN or infinite. Use a checkpoint from before that happened."
        )
    if not torch.equal(first, second):
        apart = float((first - second).abs().max())
        raise ConfigError(
            f"model.name is {name}: the same tokens scored twice differ by {apart:.1e}. Something "
            "random is left in its forward (a dropout klinic does not know), and ratios and KLs "
            "would be noise. Set it to 0 in the model's config."
        )
