"""Prints the memory that a weight sync to a vLLM engine takes, at both ends, and its seconds.

python sync_memory.py MODEL DTYPE BUCKET_MIB ROUNDS [LORA_RANK]

The first syncs do not count: they import and allocate what stays.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from klinic.model import weight_stream
from klinic.model.adapters import has_adapter
from klinic.model.loading import Policy, load_policy
from klinic.model.policy_source import PolicySource
from klinic.model.weights import trainable_tensors
from klinic.recipe.sections import ModelSection
from klinic.runtime.process_tree import descendant_pids
from klinic.sampler.token_sampling import SamplingParams
from klinic.sampler.vllm.engine import EngineConfig, SubprocessEngine
from klinic.sampler.vllm.sampler import VllmSampler
from unique_memory import PeakMeter, unique_set_size

WARM_UP = 2
BUCKET_OF_STREAMS: Any = weight_stream.WeightStream.__init__.__kwdefaults__


def main(folder: Path, model: str, dtype: str, bucket: int, rounds: int, rank: int | None) -> None:
    """Sync some rounds, and meter those after the first ones."""
    torch.set_num_threads(1)
    BUCKET_OF_STREAMS["bucket_bytes"] = bucket * 2**20
    config = EngineConfig(
        model=model,
        dtype="bfloat16" if dtype == "bf16" else "float32",
        window=512,
        remote=False,
        lora_rank=rank,
        threads=1,
        log=folder / "vllm.log",
    )
    section = ModelSection(name=model, dtype=dtype, lora_rank=rank)
    policy = load_policy(section, temperature=1.0, seed=0)
    engine = SubprocessEngine(config)
    worker = max(descendant_pids(os.getpid()), key=unique_set_size)
    settings = {"params": SamplingParams(), "max_new_tokens": 8, "group_size": 2, "seed": 0}
    sampler = VllmSampler(policy, PolicySource(policy), engine, **settings)
    for number in range(WARM_UP + rounds):
        update(policy, number)
        measured = measure_sync(sampler, worker)
        if number >= WARM_UP:
            sys.stdout.write(json.dumps(measured) + "\n")
            sys.stdout.flush()
    sampler.close()


def update(policy: Policy, seed: int) -> None:
    """Move every trained weight a little."""
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        for p in trainable_tensors(policy.lm).values():
            p.add_(1e-3 * (p.std() + 0.1) * torch.randn_like(p))


def measure_sync(sampler: VllmSampler, worker: int) -> dict[str, Any]:
    """Return bytes above idle at both ends, seconds, and what the probe says of another sync."""
    source = sampler._source
    weights = source.publish()
    meters = [PeakMeter(), PeakMeter(worker)]
    for meter in meters:
        meter.start()
    start = time.perf_counter()
    if has_adapter(sampler.policy.lm):
        with source.stream_weights() as stream:
            sampler.put_adapter(weights, stream.collect())
    else:
        sampler._send_weights(weights)
    seconds = time.perf_counter() - start
    sender, receiver = (meter.stop() - meter.first for meter in meters)
    loaded = sampler.load(weights)
    return {
        "sender": sender,
        "receiver": receiver,
        "seconds": seconds,
        "gaps": loaded.sync_gaps,
        "damage": loaded.damage,
    }


if __name__ == "__main__":
    name, kind, size, times, *more = sys.argv[1:]
    with tempfile.TemporaryDirectory() as temporary:
        rank = int(more[0]) if more else None
        main(Path(temporary), name, kind, int(size), int(times), rank)
