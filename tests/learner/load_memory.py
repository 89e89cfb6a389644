"""Prints the memory that a rank takes while it loads policy and reference.

python load_memory.py RANK SIZE FOLDER SMALL_MODEL MODEL

The unique set size (USS) counts the pages that no other process has. The small model is loaded
before the baseline is read, so that everything is imported by then.
"""

import gc
import json
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from klinic.learner.fsdp import FsdpLearner
from klinic.model.start_digests import StartDigests
from klinic.recipe.loading import from_keywords
from klinic.training.learner_processes import build_sharded_learner

INTERVAL = 0.01  # seconds between two readings


def unique_set_size() -> int:
    """Return the bytes of the pages that only this process has."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(size.split()[0]) for name, size in (line.split(":") for line in lines)}
    return 1024 * (sizes["Private_Clean"] + sizes["Private_Dirty"])


class PeakMeter(threading.Thread):
    """Reads the unique set size until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = unique_set_size()
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(INTERVAL):
            self.peak = max(self.peak, unique_set_size())

    def stop(self) -> int:
        """Return the highest reading."""
        self._stopped.set()
        self.join()
        return self.peak


def load(model: str, size: int) -> FsdpLearner:
    recipe = from_keywords(
        model=model, task="arithmetic", kl_coef=0.1, **{"learner.shards": size}
    ).recipe
    learner, _ = build_sharded_learner(recipe, model, StartDigests(None), published=None)
    return learner


def main(rank: int, size: int, folder: Path, small_model: str, model: str) -> None:
    """Load the small model, then meter the load of the other."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    load(small_model, size)
    gc.collect()
    baseline = unique_set_size()
    dist.barrier()
    meter = PeakMeter()
    meter.start()
    learner = load(model, size)
    dist.barrier()
    peak = meter.stop()
    assert learner.reference is not None
    models = (learner.policy.lm, learner.reference.scorer.lm)
    whole = sum(4 * p.numel() for lm in models for p in lm.parameters())
    sys.stdout.write(
        json.dumps({"rank": rank, "baseline": baseline, "peak": peak, "whole": whole}) + "\n"
    )
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
