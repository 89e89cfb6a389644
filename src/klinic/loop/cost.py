"""Compute, traffic and disk use of one step of a recipe, at its largest."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from klinic.model.memory import BF16, FP32
from klinic.model.scale import Accelerator, Split, split
from klinic.model.traffic import sent_bytes, stored_bytes, sync_bytes
from klinic.model.work import Work, work_of

if TYPE_CHECKING:
    from klinic.loop.forecast import Forecast
    from klinic.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Bytes and FLOPs of one step in which every completion has the maximum length."""

    num_tokens: int
    """Tokens of all completions."""
    cache_per_token: int
    """Bytes of the KV cache in the sampler."""
    logits_avoided: int
    """Bytes that fp32 logits of all tokens would take; they are never materialized at once."""
    synced: int
    """Bytes of weights sent to the sampler; 0 where it samples from the learner's own weights."""
    stored: int
    """Bytes of records on disk."""
    sent: int
    """Bytes of the record sent to each other rank of the learner; 0 with one rank."""
    work: Work | None
    """None for a mixture of experts, which uses only some of its weights for a token."""


def cost_of(recipe: "Recipe", found: "Forecast") -> Cost:
    """Return the cost of a step other than memory."""
    shape, sizes = found.shape, found.sizes
    is_vllm, is_sharded = recipe.sampler.type == "vllm", recipe.learner.shards > 1
    has_copy = is_vllm or is_sharded or recipe.cluster is not None
    number = BF16 if is_vllm and recipe.model.dtype == "bf16" else FP32
    return Cost(
        num_tokens=sizes.num_completion_tokens,
        cache_per_token=number * shape.num_cached,
        logits_avoided=FP32 * shape.vocabulary * sizes.num_completion_tokens,
        synced=sync_bytes(shape) if has_copy else 0,
        stored=round(stored_bytes(shape, sizes)) if recipe.output.records_every else 0,
        sent=round(sent_bytes(sizes)) if is_sharded else 0,
        work=work_of(shape, sizes) if found.left_out is None else None,
    )


def division(found: "Forecast", device: Accelerator, *, num: int) -> Split | None:
    """Return how to split `num` accelerators between samplers and learner."""
    if found.left_out is not None:
        return None
    return split(found.shape, found.sizes, device, num=num)
