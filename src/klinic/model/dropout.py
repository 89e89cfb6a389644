"""Set every dropout rate to 0: a log-prob must depend on weights and tokens alone.

Eval mode would do the same, but it also silently disables gradient checkpointing.
"""

import torch
from torch import nn

from klinic.errors import ConfigError


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout rate in the model to 0, in dropout modules and in plain attributes."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def max_dropout_rate(model: nn.Module) -> float:
    """Return the largest dropout rate in the model."""
    rates = [
        float(value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float)
        and ("drop" in name or (name == "p" and isinstance(module, nn.modules.dropout._DropoutNd)))
    ]
    return max(rates, default=0.0)


def refuse_nondeterminism(first: torch.Tensor, second: torch.Tensor, name: str) -> None:
    """Refuse a model whose forward pass is non-finite, or differs between two identical calls."""
    if not (torch.isfinite(first).all() and torch.isfinite(second).all()):
        raise ConfigError(
            f"model.name is {name}: its hidden states are not finite, so some of its weights are "
            "NaN or infinite. Use an earlier checkpoint."
        )
    if not torch.equal(first, second):
        difference = float((first - second).abs().max())
        raise ConfigError(
            f"model.name is {name}: the same tokens scored twice differ by {difference:.1e}. Its "
            "forward pass is random (a dropout that klinic does not recognise), so ratios and KLs "
            "would be noise. Set it to 0 in the model's config."
        )
