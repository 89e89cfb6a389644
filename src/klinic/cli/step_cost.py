"""Compute, data movement and disk use of a step, as text and for `--json`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from klinic.cli.printing import format_bytes

if TYPE_CHECKING:
    from klinic.capacity.flops import StepFlops
    from klinic.capacity.forecast import StepCost
    from klinic.capacity.throughput import Accelerator, DeviceSplit
    from klinic.recipe.recipe import Recipe

PRODUCT_LABELS = {
    "reading": "reading prompts",
    "sampling": "sampling",
    "scoring": "scoring",
    "updating": "updating",
    "reference": "reference",
    "apart": "KL apart",
}
"""Labels of the matrix products, in step order; the last two occur only with a KL."""


def cost_rows(cost: "StepCost", recipe: "Recipe") -> dict[str, str]:
    """Return the cost of a step, figures by name."""
    rows = {
        "new tokens": f"{cost.num_tokens:,}",
        "their logits": f"{format_bytes(cost.logits_avoided)}, never materialized",
        "keys and values": f"{format_bytes(cost.cache_per_token)} for each token in the cache",
        "weights to the sampler": _sync_text(cost, recipe),
    }
    if cost.sent:
        rows["rows sent"] = f"{format_bytes(cost.sent)} to each process of the learner"
    if cost.stored:
        rows["evidence"] = f"about {format_bytes(cost.stored)} on disk"
    return rows | _work_rows(cost.work)


def _sync_text(cost: "StepCost", recipe: "Recipe") -> str:
    if not cost.synced:
        return "none: it samples from the trained weights"
    where = "to vLLM" if recipe.cluster is None else "to each sampler"
    return f"{format_bytes(cost.synced)} {where}"


def _work_rows(work: "StepFlops | None") -> dict[str, str]:
    if work is None:
        return {"matrix products": "unknown: not every weight is used for every token"}
    total = work.total_flops.total_flops
    parts = {name: getattr(work, field).total_flops for field, name in PRODUCT_LABELS.items()}
    shares = ", ".join(f"{name} {num / total:.0%}" for name, num in parts.items() if num)
    rows = {"matrix products": format_flop(total), "of them": shares}
    if work.kl.total_flops:
        rows["added by the KL"] = (
            f"{work.kl.total_flops / work.learning.total_flops:.0%} of learning"
        )
    return rows


def split_lines(split: "DeviceSplit | None", device: "Accelerator") -> list[str]:
    """Return the best split of accelerators between learner and dedicated samplers."""
    if split is None:
        return ["Too few GPUs for a learner and dedicated samplers."]
    learning = split.learning
    bound = "gathering shards" if learning.gathering > learning.computing else "matrix products"
    kl = f", {format_seconds(learning.kl)} for the KL" if learning.kl else ""
    return [
        f"Best split with dedicated sampler GPUs: {split.samplers} to sample "
        f"({format_seconds(split.sampling)} a step), {split.learners} to learn "
        f"({format_seconds(learning.total_seconds)}, bound by {bound}{kl}).",
        f"Assumed of each GPU: {device.flops / 1e12:,.0f} TFLOP/s in bf16 and "
        f"{device.flops_fp32 / 1e12:.0f} in fp32, {device.utilization:.0%} of them reached; "
        f"{device.bandwidth / 1e12:.3g} TB/s to its memory and "
        f"{8 * device.network / 1e9:.0f} Gb/s to others.",
    ]


def split_fields(split: "DeviceSplit | None") -> dict[str, Any] | None:
    """Return the split for `--json`, in seconds."""
    if split is None:
        return None
    return {
        "samplers": split.samplers,
        "learners": split.learners,
        "sampling": split.sampling,
        "learning": split.learning.total_seconds,
        "gathering": split.learning.gathering,
        "kl": split.learning.kl,
    }


def cost_fields(cost: "StepCost") -> dict[str, Any]:
    """Return the cost for `--json`, in bytes and FLOP."""
    fields = {name: value for name, value in asdict(cost).items() if name != "work"}
    work = cost.work
    if work is None:
        return {**fields, "flop": None, "kl_share": None}
    return {
        **fields,
        "flop": {name: getattr(work, name).total_flops for name in PRODUCT_LABELS},
        "kl_share": work.kl.total_flops / work.learning.total_flops,
    }


def format_flop(num: int | float) -> str:
    """Return a number of FLOP with an SI prefix.

    >>> format_flop(2.5e15), format_flop(3e9), format_flop(7e20)
    ('2.5 PFLOP', '3.0 GFLOP', '700.0 EFLOP')
    """
    prefixes = {"E": 1e18, "P": 1e15, "T": 1e12, "G": 1e9}
    prefix, one = next((p, n) for p, n in prefixes.items() if num >= n or p == "G")
    return f"{num / one:.1f} {prefix}FLOP"


def format_seconds(num: float) -> str:
    """Return seconds with three significant digits.

    >>> format_seconds(241.3), format_seconds(0.01234)
    ('241 s', '0.0123 s')
    """
    return f"{num:.3g} s"
