"""How fast a cluster on one machine is: two samplers against one, and weights on their way.

    python -m bench.cluster samplers
    python -m bench.cluster sync MODEL

Every figure is a ratio of interleaved measurements, printed beside the same ratio of one thing with
itself.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from klinic.evidence.rollout import Prompt
from klinic.model.weights import Weights, fingerprint, trainable_tensors
from klinic.recipe.loading import from_keywords
from klinic.training.build import start_policy
from klinic.training.ray_run import RayWorkers
from klinic.training.source import PythonInputs, load_task_data
from klinic.training.train import make_deterministic

ROUNDS = 9
console = Console(highlight=False, soft_wrap=True)


def interleaved(*works: Callable[[], Any]) -> list[list[float]]:
    """Return the seconds of each work, measured in turn after a round that does not count."""
    seconds: list[list[float]] = [[] for _ in works]
    for number in range(ROUNDS + 1):
        for work, found in zip(works, seconds, strict=True):
            start = time.perf_counter()
            work()
            if number:
                found.append(time.perf_counter() - start)
    return seconds


def opened(folder: Path, **settings: Any) -> tuple[Any, Any, Any]:
    """Return a policy, a cluster and its sampler."""
    recipe = from_keywords(
        task="arithmetic", kl_coef=0.02, threads=1, **{"output.dir": str(folder), **settings}
    ).recipe
    make_deterministic(recipe)
    source = load_task_data(recipe, PythonInputs())
    policy, where = start_policy(recipe, folder, source, console)
    cluster = RayWorkers(recipe, folder)
    return policy, cluster, cluster.make_sampler(policy, where)


def ratio(first: list[float], second: list[float]) -> str:
    """Return the median of pairwise ratios, and between which bounds all of them are."""
    pairs = [a / b for a, b in zip(first, second, strict=True)]
    return f"{statistics.median(pairs):.3f} [{min(pairs):.3f}, {max(pairs):.3f}]"


def samplers(folder: Path) -> None:
    """Measure two samplers against one, on the same prompts."""
    policy, cluster, sampler = opened(
        folder, model="tiny", max_new_tokens=64, **{"cluster.samplers": 2, "group_size": 8}
    )
    weights = Weights(version=0, fingerprint=fingerprint(policy.lm), location="process")
    sampler.load(weights)
    crew = sampler._pool
    members = crew.ready(num=2)
    stream = np.random.default_rng(0)
    prompts = [
        Prompt(index=i, text="", token_ids=stream.integers(3, 50, 16), columns={})
        for i in range(16)
    ]
    halves = [prompts[:8], prompts[8:]]
    from klinic.cluster.worker_pool import map_over_pool

    def by(which: list[Any]) -> Callable[[], Any]:
        return lambda: map_over_pool(crew, "sample", halves, 1, available=lambda: which)

    one, again, two = interleaved(by(members[:1]), by(members[:1]), by(members))
    console.print(f"one sampler {statistics.median(one):.3f} s, two {statistics.median(two):.3f} s")
    console.print(f"one against itself {ratio(one, again)}")
    console.print(f"two against one {ratio(one, two)} times as fast")
    sampler.close()
    cluster.close()


def sync(folder: Path, model: str) -> None:
    """Measure a weight sync against a copy of the same bytes in memory."""
    policy, cluster, sampler = opened(folder, model=model, **{"cluster.samplers": 1})
    tensors = trainable_tensors(policy.lm)
    size = sum(p.numel() * p.element_size() for p in tensors.values())
    there = {name: torch.empty_like(p) for name, p in tensors.items()}
    weights = Weights(version=0, fingerprint=fingerprint(policy.lm), location="process")

    def copy() -> None:
        with torch.no_grad():
            for name, p in tensors.items():
                there[name].copy_(p)

    moved, copied, again = interleaved(lambda: sampler.load(weights), copy, copy)
    took, took_copy = statistics.median(moved), statistics.median(copied)
    console.print(f"{size / 2**20:.0f} MB: sync {took:.3f} s, copy {took_copy:.3f} s")
    console.print(f"copy against itself {ratio(copied, again)}")
    console.print(f"sync against copy {ratio(moved, copied)}")
    sampler.close()
    cluster.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        if sys.argv[1] == "samplers":
            samplers(Path(made))
        else:
            sync(Path(made), sys.argv[2])
