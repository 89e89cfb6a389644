"""What a step of a recipe computes, moves and leaves on disk, at its largest."""

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
    """Bytes and matrix products of one step, all completions as long as they may be."""

    num_tokens: int
    """Of all completions."""
    cache_per_token: int
    """Bytes of keys and values in the sampler."""
    logits_avoided: int
    """Bytes that the logits of all tokens would take in fp32; they never exist at once."""
    synced: int
    """Bytes of weights to the sampler; 0 where it draws from the learner's own."""
    stored: int
    """Bytes of evidence on disk."""
    sent: int
    """Bytes of the record to each other process of the learner; 0 where there is none."""
    work: Work | None
    """None for a model of experts, which uses some of its weights for a token."""


def cost_of(recipe: "Recipe", found: "Forecast") -> Cost:
    """Return what a step costs beside memory."""
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
    """Return how samplers and a learner would share so many accelerators."""
    if found.left_out is not None:
        return None
    return split(found.shape, found.sizes, device, num=num)
