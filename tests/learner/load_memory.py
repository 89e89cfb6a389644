"""Prints the memory that a rank takes while it loads policy and reference.

python load_memory.py RANK SIZE FOLDER SMALL_MODEL MODEL

The unique set size (USS) counts the pages that no other process has. The small model is loaded
before the baseline is read, so that everything is imported by then.
"""

import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from klinic.learner.fsdp import FsdpLearner
from klinic.recipe.loading import from_keywords
from klinic.training.learner_processes import build_sharded_learner
from unique_memory import PeakMeter, unique_set_size


def load(model: str, size: int) -> FsdpLearner:
    recipe = from_keywords(
        model=model, task="arithmetic", kl_coef=0.1, **{"learner.shards": size}
    ).recipe
    learner, *_ = build_sharded_learner(recipe, model)
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
