"""From hidden states to logits, outside the model's own forward.

A causal LM's forward makes logits of every position at once, which for long completions and large
vocabularies is most of the memory. klinic takes the hidden states and applies the head to some
tokens at a time. Some models do more than a matrix product there; what they do is repeated here,
and `agrees_with_model` holds it against the model's own logits when a model is loaded.
"""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from klinic.errors import ConfigError

TOLERANCE = (
    1e-3  # relative; the kernels of two shapes differ by 1e-6, a missing softcap by far more
)


class Head(nn.Module):
    """The output embedding of a causal LM with what its config does to the logits."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        # in a tuple: the head is the model's, not a second owner of its parameters
        self._embedding = (lm.get_output_embeddings(),)
        config = lm.config.get_text_config()
        self.scale = _scale(config)
        self.softcap = getattr(config, "final_logit_softcapping", None)

    def forward(self, hidden: Float[Tensor, "n H"]) -> Float[Tensor, "n V"]:
        """Return the logits, computed in the precision of the weights and at least in fp32."""
        (embedding,) = self._embedding
        with torch.autocast(hidden.device.type, enabled=False):
            precise = torch.promote_types(embedding.weight.dtype, torch.float32)
            logits = embedding(hidden.to(embedding.weight.dtype)).to(precise)
        if self.scale != 1:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return cast(Tensor, logits)


def _scale(config: Any) -> float:
    """Return what a config multiplies logits by: Cohere's logit_scale, Granite's divisor."""
    divisor = getattr(config, "logits_scaling", None)
    factor = getattr(config, "logit_scale", None)
    return float(1.0 if factor is None else factor) / float(1.0 if divisor is None else divisor)


def agrees_with_model(
    logits: Float[Tensor, "n V"], expected: Float[Tensor, "n V"], name: str
) -> None:
    """Refuse a model whose logits are not what its head makes of its hidden states."""
    apart = float((logits - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
    if not apart <= TOLERANCE:
        raise ConfigError(
            f"model.name is {name}: its logits differ from its output embedding applied to its "
            f"hidden states by {apart:.1e} of the largest (limit {TOLERANCE:.0e}). It changes "
            "logits in a way klinic does not know, so every log-prob would be wrong. Use another "
            "model, or report its class."
        )
