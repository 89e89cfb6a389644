"""Compute, data movement and disk use of a step, as text and for `--json`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from klinic.cli.printing import size

if TYPE_CHECKING:
    from klinic.loop.cost import Cost
    from klinic.model.scale import Accelerator, Split
    from klinic.model.work import Work
    from klinic.recipe.recipe import Recipe

PARTS = {
    "reading": "reading prompts",
    "sampling": "sampling",
    "scoring": "scoring",
    "updating": "updating",
    "reference": "reference",
    "apart": "KL apart",
}
"""Labels of the matrix products, in step order; the last two occur only with a KL."""


def cost_rows(cost: "Cost", recipe: "Recipe") -> dict[str, str]:
    """Return the cost of a step, figures by name."""
    rows = {
        "new tokens": f"{cost.num_tokens:,}",
        "their logits": f"{size(cost.logits_avoided)}, never materialized",
        "keys and values": f"{size(cost.cache_per_token)} for each token in the cache",
        "weights to the sampler": _synced(cost, recipe),
    }
    if cost.sent:
        rows["record broadcast"] = f"{size(cost.sent)} to each process of the learner"
    if cost.stored:
        rows["evidence"] = f"about {size(cost.stored)} on disk"
    return rows | _work_rows(cost.work)


def _synced(cost: "Cost", recipe: "Recipe") -> str:
    if not cost.synced:
        return "none: it samples from the trained weights"
    where = "to vLLM" if recipe.sampler.type == "vllm" else "to the first process, which samples"
    if recipe.cluster is not None:
        where = "to each sampler"
    return f"{size(cost.synced)} {where}, in fp32"


def _work_rows(work: "Work | None") -> dict[str, str]:
    if work is None:
        return {"matrix products": "unknown: not every weight is used for every token"}
    total = work.total.total
    parts = {name: getattr(work, field).total for field, name in PARTS.items()}
    shares = ", ".join(f"{name} {num / total:.0%}" for name, num in parts.items() if num)
    rows = {"matrix products": flop(total), "of them": shares}
    if work.kl.total:
        rows["added by the KL"] = f"{work.kl.total / work.learning.total:.0%} of learning"
    return rows


def split_lines(found: "Split | None", device: "Accelerator") -> list[str]:
    """Return the best split of accelerators between learner and dedicated samplers."""
    if found is None:
        return ["Too few GPUs for a learner and dedicated samplers."]
    learning = found.learning
    bound = "gathering shards" if learning.gathering > learning.computing else "matrix products"
    kl = f", {seconds(learning.kl)} for the KL" if learning.kl else ""
    return [
        f"Best split with dedicated sampler GPUs: {found.samplers} to sample "
        f"({seconds(found.sampling)} a step), {found.learners} to learn "
        f"({seconds(learning.seconds)}, bound by {bound}{kl}).",
        f"Assumed of each GPU: {device.flops / 1e12:,.0f} TFLOP/s in bf16 and "
        f"{device.flops_fp32 / 1e12:.0f} in fp32, {device.use:.0%} of them reached; "
        f"{device.bandwidth / 1e12:.3g} TB/s to its memory and "
        f"{8 * device.network / 1e9:.0f} Gb/s to others.",
    ]


def split_fields(found: "Split | None") -> dict[str, Any] | None:
    """Return the split for `--json`, in seconds."""
    if found is None:
        return None
    return {
        "samplers": found.samplers,
        "learners": found.learners,
        "sampling": found.sampling,
        "learning": found.learning.seconds,
        "gathering": found.learning.gathering,
        "kl": found.learning.kl,
    }


def cost_fields(cost: "Cost") -> dict[str, Any]:
    """Return the cost for `--json`, in bytes and FLOP."""
    fields = {name: value for name, value in asdict(cost).items() if name != "work"}
    work = cost.work
    if work is None:
        return {**fields, "flop": None, "kl_share": None}
    return {
        **fields,
        "flop": {name: getattr(work, name).total for name in PARTS},
        "kl_share": work.kl.total / work.learning.total,
    }


def flop(num: int | float) -> str:
    """Return a number of FLOP with an SI prefix.

    >>> flop(2.5e15), flop(3e9), flop(7e20)
    ('2.5 PFLOP', '3.0 GFLOP', '700.0 EFLOP')
    """
    prefixes = {"E": 1e18, "P": 1e15, "T": 1e12, "G": 1e9}
    prefix, one = next((p, n) for p, n in prefixes.items() if num >= n or p == "G")
    return f"{num / one:.1f} {prefix}FLOP"


def seconds(num: float) -> str:
    """Return seconds with three significant digits.

    >>> seconds(241.3), seconds(0.01234)
    ('241 s', '0.0123 s')
    """
    return f"{num:.3g} s"
