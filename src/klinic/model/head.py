"""Compute logits from hidden states, outside the model's own forward.

A causal LM's forward computes the logits of every position at once, which dominates memory for long
completions and large vocabularies. klinic takes the hidden states and applies the head to a chunk
of tokens at a time. Some models scale or softcap their logits; `Head` repeats that, and
`check_head_logits` compares the result with the model's own logits when a model is loaded.

In bf16 on a GPU a trained head multiplies operands rounded to bf16 and sums in fp32: fp32 products
take longer there than the rest of the model. Against fp32 operands, at a vocabulary of 152,064 and
logits of standard deviation 3, log-probs differ by at most 0.02 nats (mean 0.006), less
than the error of an engine's bf16 logits, and gradients by 0.4%. Policy, reference and sampler
use the same product, so equal policies have a KL of exactly 0.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from klinic.errors import ConfigError

LOGIT_TOLERANCE = (
    1e-3  # relative; kernels of different shapes differ by 1e-6, a missing softcap by far more
)
HAS_BF16_PRODUCT = hasattr(torch.ops.aten.mm, "dtype") and torch.version.hip is None
BF16_DEVICES = ("cuda",) if HAS_BF16_PRODUCT else ()
"""Devices on which torch (from 2.8, not for AMD) multiplies bf16 matrices into an fp32 result."""


def multiply_bf16(one: Float[Tensor, "a b"], other: Float[Tensor, "b c"]) -> Float[Tensor, "a c"]:
    """Return the product of two bf16 matrices, summed and returned in fp32."""
    if one.device.type == "cuda":
        return torch.mm(one, other, out_dtype=torch.float32)
    return one.float() @ other.float()  # products of bf16 numbers are exact in fp32


AddGradient = Callable[[Tensor], None]


class Head(nn.Module):
    """The output embedding of a causal LM, with the config's logit scale and softcap."""

    def __init__(self, lm: Any, *, in_bf16: bool = False) -> None:
        super().__init__()
        self.in_bf16 = in_bf16
        """Whether to multiply bf16 operands where the device has such a product."""
        # in a tuple, so that the model stays the only owner of the head's parameters
        self._embedding = (lm.get_output_embeddings(),)
        config = lm.config.get_text_config()
        self.logit_scale = _logit_scale(config)
        self.softcap = getattr(config, "final_logit_softcapping", None)
        self._rounded: tuple[Tensor, int, Tensor] | None = None  # weight, its version, in bf16
        self.add_gradient: AddGradient | None = None
        """Adds a gradient of the weight where autograd cannot at once: to the weight's shards."""

    @property
    def trainable_weights(self) -> list[Tensor]:
        """The trainable parameters of the head."""
        return [p for p in self._embedding[0].parameters() if p.requires_grad]

    def new_gradient(self) -> "HeadGradient | None":
        """Return an accumulator for the weight's gradient; None where autograd must compute it."""
        weight = self._embedding[0].weight
        if not (self._is_product and weight.requires_grad):
            return None
        rounded = self.round_weight(weight) if self._multiplies_bf16(weight) else None
        return HeadGradient(weight, rounded=rounded, add_gradient=self.add_gradient)

    @property
    def _is_product(self) -> bool:
        (embedding,) = self._embedding
        return type(embedding) is nn.Linear and embedding.bias is None

    def _multiplies_bf16(self, weight: Tensor) -> bool:
        is_possible = weight.dtype == torch.float32 and weight.device.type in BF16_DEVICES
        return self.in_bf16 and self._is_product and is_possible

    def round_weight(self, weight: Tensor) -> Tensor:
        """Return the weight in bf16; it is rounded once, until an update changes it."""
        of, version, rounded = self._rounded or (None, 0, weight)
        if of is not weight or version != weight._version:
            rounded = weight.detach().bfloat16()
            self._rounded = (weight, weight._version, rounded)
        return rounded

    def forward(
        self, hidden: Float[Tensor, "n H"], gradient: "HeadGradient | None" = None
    ) -> Float[Tensor, "n V"]:
        """Return the logits, computed in the dtype of the weights and returned in at least fp32."""
        (embedding,) = self._embedding
        with torch.autocast(hidden.device.type, enabled=False):
            logit_dtype = torch.promote_types(embedding.weight.dtype, torch.float32)
            cast_hidden = hidden.to(embedding.weight.dtype)
            if gradient is not None:
                product = gradient.project_hidden(cast_hidden)
            elif self._multiplies_bf16(embedding.weight):
                product = _Bf16Linear.apply(  # type: ignore[no-untyped-call]
                    cast_hidden, embedding.weight, self.round_weight(embedding.weight)
                )
            else:
                product = embedding(cast_hidden)
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

    def __init__(
        self,
        weight: Tensor,
        *,
        rounded: Tensor | None = None,
        add_gradient: AddGradient | None = None,
    ) -> None:
        """`rounded` is the weight in bf16, for a product of bf16 operands."""
        self.weight = weight
        self.grad: Tensor | None = None
        self.add_gradient = add_gradient
        self._rounded = rounded

    def project_hidden(self, hidden: Tensor) -> Tensor:
        """Return the logits; their backward pass accumulates here, and autograd sees no weight."""
        logits: Tensor = _AccumulatingLinear.apply(hidden, self)  # type: ignore[no-untyped-call]
        return logits

    def multiply_weight(self, hidden: Tensor) -> Tensor:
        """Return hidden states times the transposed weight."""
        if self._rounded is None:
            return nn.functional.linear(hidden, self.weight)
        return multiply_bf16(hidden.bfloat16(), self._rounded.T)

    def hidden_grad(self, grad_logits: Tensor) -> Tensor:
        """Return the gradient with respect to the hidden states."""
        if self._rounded is None:
            return grad_logits @ self.weight
        return multiply_bf16(grad_logits.bfloat16(), self._rounded)

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
        return gradient.multiply_weight(hidden)

    @staticmethod
    def backward(ctx: Any, grad_logits: Tensor) -> tuple[Tensor, None]:
        (hidden,) = ctx.saved_tensors
        ctx.sums.accumulate_grad(grad_logits, hidden)
        return ctx.sums.hidden_grad(grad_logits), None


class _Bf16Linear(torch.autograd.Function):
    """A product of rounded operands; the gradient passes through the rounding unchanged."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, rounded: Tensor) -> Tensor:  # noqa: ARG004
        ctx.save_for_backward(hidden, rounded)
        return multiply_bf16(hidden.bfloat16(), rounded.T)

    @staticmethod
    def backward(ctx: Any, grad_logits: Tensor) -> tuple[Tensor, Tensor | None, None]:
        hidden, rounded = ctx.saved_tensors
        grad_weight = grad_logits.T @ hidden if ctx.needs_input_grad[1] else None
        return multiply_bf16(grad_logits.bfloat16(), rounded), grad_weight, None


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
