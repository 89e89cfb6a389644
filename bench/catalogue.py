"""The measurements of `python -m bench`, by name."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bench import loss, padding, rollout, step

BENCHES: Mapping[str, Callable[..., dict[str, Any]]] = {
    **{f"step-{size}": partial(step.step, size) for size in ("1M", "10M", "124M")},
    "kl-10M": partial(step.kl_cost, "10M"),
    **{f"evidence-{size}": partial(step.evidence, size) for size in ("1M", "10M", "124M")},
    "attach-10M": partial(step.attach, "10M"),
    "rollout": rollout.rollout,
    "loss-memory": loss.memory,
    "loss-time": loss.seconds,
    "padding": padding.padding,
}
