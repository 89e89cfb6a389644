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

LOGIT_TOLERANCE = (
    1e-3  # relative; kernels of different shapes differ by 1e-6, a missing softcap by far more
)


class Head(nn.Module):
    """The output embedding of a causal LM, with the config's logit scale and softcap."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        # in a tuple, so that the model stays the only owner of the head's parameters
        self._embedding = (lm.get_output_embeddings(),)
        config = lm.config.get_text_config()
        self.logit_scale = _logit_scale(config)
        self.softcap = getattr(config, "final_logit_softcapping", None)

    @property
    def trainable_weights(self) -> list[Tensor]:
        """The trainable parameters of the head."""
        return [p for p in self._embedding[0].parameters() if p.requires_grad]

    def new_gradient(self) -> "HeadGradient | None":
        """Return an accumulator for the weight's gradient; None where autograd must compute it."""
        (embedding,) = self._embedding
        is_product = type(embedding) is nn.Linear and embedding.bias is None
        is_trained = is_product and embedding.weight.requires_grad
        return HeadGradient(embedding.weight) if is_trained else None

    def forward(
        self, hidden: Float[Tensor, "n H"], gradient: "HeadGradient | None" = None
    ) -> Float[Tensor, "n V"]:
        """Return the logits, computed in the dtype of the weights and returned in at least fp32."""
        (embedding,) = self._embedding
        with torch.autocast(hidden.device.type, enabled=False):
            logit_dtype = torch.promote_types(embedding.weight.dtype, torch.float32)
            cast_hidden = hidden.to(embedding.weight.dtype)
            product = (
                embedding(cast_hidden) if gradient is None else gradient.project_hidden(cast_hidden)
            )
            logits: Tensor = product.to(logit_dtype)
        if self.logit_scale != 1:  # multiplying by 1 copies the whole tensor
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


class HeadGradient:
    """The gradient of the head's weight, accumulated in place.

    It is as large as the head. Allocating it for each chunk of tokens and adding the results takes
    longer than the matrix product itself.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.grad: Tensor | None = None

    def project_hidden(self, hidden: Tensor) -> Tensor:
        """Return the logits; their backward pass accumulates here, and autograd sees no weight."""
        logits: Tensor = _AccumulatingLinear.apply(hidden, self)  # type: ignore[no-untyped-call]
        return logits

    def accumulate_grad(self, grad_logits: Tensor, hidden: Tensor) -> None:
        """Accumulate the gradient of a chunk of tokens."""
        if self.grad is None:
            self.grad = grad_logits.T @ hidden
        else:
            self.grad.addmm_(grad_logits.T, hidden)


class _AccumulatingLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gradient: HeadGradient) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.sums = gradient
        return nn.functional.linear(hidden, gradient.weight)

    @staticmethod
    def backward(ctx: Any, grad_logits: Tensor) -> tuple[Tensor, None]:
        (hidden,) = ctx.saved_tensors
        ctx.sums.accumulate_grad(grad_logits, hidden)
        return grad_logits @ ctx.sums.weight, None


def _logit_scale(config: Any) -> float:
    """Return the config's logit scale: Cohere's `logit_scale`, over Granite's `logits_scaling`."""
    divisor = getattr(config, "logits_scaling", None)
    factor = getattr(config, "logit_scale", None)
    return float(1.0 if factor is None else factor) / float(1.0 if divisor is None else divisor)


def check_head_logits(
    logits: Float[Tensor, "n V"], expected: Float[Tensor, "n V"], name: str
) -> None:
    """Refuse a model whose logits differ from its head applied to its hidden states."""
    relative_difference = float(
        (logits - expected).abs().max() / expected.abs().max().clamp(min=1e-12)
    )
    if not relative_difference <= LOGIT_TOLERANCE:
        raise ConfigError(
            f"model.name is {name}: its logits differ from its output embedding applied to its "
            f"hidden states by {relative_difference:.1e} of the largest "
            f"(limit {LOGIT_TOLERANCE:.0e}). It transforms "
            "logits in a way that klinic does not support, so every log-prob would be wrong. Use "
            "another model, or report its class."
        )
