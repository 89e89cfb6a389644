"""What one of two processes of a sharded learner allocates: this file is run once for each.

python shard_peaks.py RANK SIZE FOLDER RECIPE
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from allocated_memory import allocated_peak_of
from klinic.capacity.forecast import largest_record
from klinic.capacity.meta_tensors import MemoryMeter
from klinic.capacity.prompt_lengths import find_prompt_lengths
from klinic.learner.diagnostics import EARLY_INTERVAL
from klinic.learner.fsdp import FsdpLearner, TorchProcessGroup
from klinic.learner.protocol import LossScales
from klinic.model.loading import load_policy
from klinic.model.reference import reference_at_start
from klinic.recipe.loading import load_recipe
from klinic.recipe.recipe import Recipe
from klinic.training.build import learner_settings

PeakOf = Callable[[Callable[[], Any]], tuple[int, Any]]


class TensorMeter(TorchDispatchMode):
    """Counts the storages of real tensors from the operation that makes them until they are freed.

    Storages that Python code of torch holds a little longer than its C++ code count as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.meter = MemoryMeter(lambda _: "all")

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations on shards come here next
        result = operation(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            # shapes of results that DTensor asks for are no memory
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                self.meter.count_storage(value)
        return result

    def peak_of(self, act: Callable[[], Any]) -> tuple[int, Any]:
        """Return the bytes at the highest point of an act."""
        self.meter.reset_peak()
        result = act()
        return self.meter.peak.total(), result


def total_peak_of(act: Callable[[], Any]) -> tuple[int, Any]:
    """Return the bytes at the highest point of an act, with all that was allocated before.

    The copies that gloo makes for itself count as well; NCCL makes none.
    """
    before = held_bytes()
    peak, result = allocated_peak_of(act)
    return before + peak, result


def held_bytes() -> int:
    """Return the bytes of all tensors that are alive."""
    gc.collect()
    # views share a storage; a sharded parameter is seen by its shard
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(sizes.values())


def main(rank: int, size: int, folder: Path, path: str) -> None:
    """Measure this rank; the first one writes its peaks."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    recipe = load_recipe(path, []).recipe
    counter = TensorMeter()
    with counter.meter.watch_resizing(), counter:
        by_operations = measure_steps(recipe, counter.peak_of)
    by_allocator = measure_steps(recipe, total_peak_of)
    if rank == 0:
        # each counts a little too much, of different things
        peaks = {name: min(by_operations[name], by_allocator[name]) for name in by_allocator}
        (folder / "peaks.json").write_text(json.dumps(peaks))
    dist.destroy_process_group()


def measure_steps(recipe: Recipe, peak_of: PeakOf) -> dict[str, int]:
    """Return the peaks of a diagnostic step, after one that fills the moments."""
    policy = load_policy(recipe.model, temperature=1.0, seed=0)
    reference = reference_at_start(policy.scorer, source="")
    objective, settings = learner_settings(recipe)
    learner = FsdpLearner(
        policy,
        reference,
        objective=objective,
        settings=settings,
        group=TorchProcessGroup(),
    )
    lengths = find_prompt_lengths(recipe, window=None)
    num_rows = recipe.loop.prompts_per_step * recipe.loop.group_size
    peaks = {}
    for step in (2, EARLY_INTERVAL + 1):
        record = largest_record(recipe, lengths, num_rows, step)
        score = partial(learner.score, record, needs_reference=True)
        peaks["scoring"], scored = peak_of(score)
        update = partial(learner.prepare, scored, LossScales(kl_coef=0.01))
        peaks["updating"], _ = peak_of(update)
        peaks["committing"], _ = peak_of(learner.commit)
        del scored, score, update
    return peaks


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
