"""Compute logits from hidden states, outside the model's own forward.

A causal LM's forward computes the logits of every position at once, which dominates memory for long
completions and large vocabularies. klinic takes the hidden states and applies the head to a chunk
of tokens at a time. Some models scale or softcap their logits; `Head` repeats that, and
`check_head_logits` compares the result with the model's own logits when a model is loaded.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from klinic.errors import ConfigError

TOLERANCE = (
    1e-3  # relative; kernels of different shapes differ by 1e-6, a missing softcap by far more
)


class Head(nn.Module):
    """The output embedding of a causal LM, with the config's logit scale and softcap."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        # in a tuple, so that the model stays the only owner of the head's parameters
        self._embedding = (lm.get_output_embeddings(),)
        config = lm.config.get_text_config()
        self.scale = _scale(config)
        self.softcap = getattr(config, "final_logit_softcapping", None)

    @property
    def weights(self) -> list[Tensor]:
        """The trainable parameters of the head."""
        return [p for p in self._embedding[0].parameters() if p.requires_grad]

    def sums(self) -> "Sums | None":
        """Return an accumulator for the weight's gradient; None where autograd must compute it."""
        (embedding,) = self._embedding
        is_product = type(embedding) is nn.Linear and embedding.bias is None
        is_trained = is_product and embedding.weight.requires_grad
        return Sums(embedding.weight) if is_trained else None

    def forward(
        self, hidden: Float[Tensor, "n H"], sums: "Sums | None" = None
    ) -> Float[Tensor, "n V"]:
        """Return the logits, computed in the dtype of the weights and returned in at least fp32."""
        (embedding,) = self._embedding
        with torch.autocast(hidden.device.type, enabled=False):
            precise = torch.promote_types(embedding.weight.dtype, torch.float32)
            at = hidden.to(embedding.weight.dtype)
            product = embedding(at) if sums is None else sums.product(at)
            logits: Tensor = product.to(precise)
        if self.scale != 1:  # multiplying by 1 copies the whole tensor
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


class Sums:
    """The gradient of the head's weight, accumulated in place.

    It is as large as the head. Allocating it for each chunk of tokens and adding the results takes
    longer than the matrix product itself.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.of_weight: Tensor | None = None

    def product(self, hidden: Tensor) -> Tensor:
        """Return the logits; their backward pass accumulates here, and autograd sees no weight."""
        logits: Tensor = _Product.apply(hidden, self)  # type: ignore[no-untyped-call]
        return logits

    def add(self, of_logits: Tensor, hidden: Tensor) -> None:
        """Accumulate the gradient of a chunk of tokens."""
        if self.of_weight is None:
            self.of_weight = of_logits.T @ hidden
        else:
            self.of_weight.addmm_(of_logits.T, hidden)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, sums: Sums) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.sums = sums
        return nn.functional.linear(hidden, sums.weight)

    @staticmethod
    def backward(ctx: Any, of_logits: Tensor) -> tuple[Tensor, None]:
        (hidden,) = ctx.saved_tensors
        ctx.sums.add(of_logits, hidden)
        return of_logits @ ctx.sums.weight, None


def _scale(config: Any) -> float:
    """Return the config's logit scale: Cohere's `logit_scale`, over Granite's `logits_scaling`."""
    divisor = getattr(config, "logits_scaling", None)
    factor = getattr(config, "logit_scale", None)
    return float(1.0 if factor is None else factor) / float(1.0 if divisor is None else divisor)


def agrees_with_model(
    logits: Float[Tensor, "n V"], expected: Float[Tensor, "n V"], name: str
) -> None:
    """Refuse a model whose logits differ from its head applied to its hidden states."""
    apart = float((logits - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
    if not apart <= TOLERANCE:
        raise ConfigError(
            f"model.name is {name}: its logits differ from its output embedding applied to its "
            f"hidden states by {apart:.1e} of the largest (limit {TOLERANCE:.0e}). It transforms "
            "logits in a way that klinic does not support, so every log-prob would be wrong. Use "
            "another model, or report its class."
        )
