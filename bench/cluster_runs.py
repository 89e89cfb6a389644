"""Does it learn on a cluster? The arithmetic recipe in several ways, on several seeds.

    python -m bench.cluster_runs FOLDER [WAY ...]

Runs that are there and whole are not made again.
"""

import statistics
import sys
from pathlib import Path

from rich.console import Console

from bench.arithmetic_runs import column, make, markdown

STEPS, SEEDS, LAST = 60, (1, 2, 3), 20
LORA = ("model.lora_rank=16", "learner.learning_rate=2e-3")
WAYS = {
    "one process": (),
    "2 learners, 2 samplers": ("cluster.learners=2", "cluster.samplers=2"),
    "2 learners, 2 samplers, LoRA": ("cluster.learners=2", "cluster.samplers=2", *LORA),
    "2 vLLM samplers": ("cluster.samplers=2", "sampler.type=vllm"),
    "2 vLLM samplers, LoRA": ("cluster.samplers=2", "sampler.type=vllm", *LORA),
    "1 sampler, 1 step ahead": ("cluster.samplers=1", "cluster.max_staleness=1"),
    "1 sampler, 4 steps ahead": ("cluster.samplers=1", "cluster.max_staleness=4"),
}


def folder_of(folder: Path, way: str, seed: int) -> Path:
    """Return where a run is."""
    return folder / f"{way.replace(', ', '-').replace(' ', '-')}-{seed}"


def row(run: Path, way: str, seed: int) -> list[str]:
    """Return a run in a line: what it learned, and how far it was from those who sampled for it."""
    accuracy, reward = column(run, "eval/accuracy"), column(run, "reward")
    ess, stale = column(run, "sampling/effective_sample_size"), column(run, "sampling/staleness")
    return [
        way,
        str(seed),
        f"{accuracy[0]:.3f} -> {accuracy[-1]:.3f}",
        f"{statistics.mean(reward[:LAST]):.3f} -> {statistics.mean(reward[-LAST:]):.3f}",
        f"{column(run, 'eval/retention')[-1]:.3f}",
        f"{statistics.mean(column(run, 'kl')[-LAST:]):.4f}",
        f"{statistics.mean(stale):.2f}, {max(stale):.0f}" if stale else "0",
        f"{statistics.mean(ess):.3f}, {min(ess):.3f}" if ess else "",
    ]


def main(folder: Path, ways: list[str]) -> None:
    """Make what is not there; print the table of all that is."""
    console = Console(highlight=False, soft_wrap=True)
    for way in ways:
        for seed in SEEDS:
            run = folder_of(folder, way, seed)
            console.print(run.name)
            extra = (*WAYS[way], "output.doctor=none", "loop.eval_every=60")
            make(run, *extra, steps=STEPS, seed=seed)
    head = ["way", "seed", "accuracy", "reward", "retention", "KL", "staleness", "ESS"]
    there = [(way, seed) for way in WAYS for seed in SEEDS if folder_of(folder, way, seed).is_dir()]
    rows = [row(folder_of(folder, way, seed), way, seed) for way, seed in there]
    console.print(markdown(head, rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(WAYS))
