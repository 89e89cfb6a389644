"""Builds the vLLM engine of a recipe, on GPUs of its own or on those of the learner."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from klinic.errors import ConfigError
from klinic.model.adapter_files import base_model_name, is_adapter
from klinic.model.adapters import has_adapter
from klinic.model.loading import Policy
from klinic.recipe.recipe import Recipe

if TYPE_CHECKING:
    from klinic.sampler.vllm.engine import Engine

MEMORY_BESIDE_LEARNER = 0.4  # of a GPU that learner and engine share
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
"""vLLM's variable for results on a GPU that do not depend on the batch, to the last bit."""


def make_engine(recipe: Recipe, policy: Policy, log: Path | None) -> "Engine":
    """Return the vLLM engine of a recipe, configured for the policy."""
    from klinic.sampler.vllm.engine import EngineConfig, SubprocessEngine
    from klinic.sampler.vllm.server import ServerEngine, server_command

    refuse_missing_gpus(recipe)
    lm = policy.lm
    rank = max(config.r for config in lm.peft_config.values()) if has_adapter(lm) else None
    base = base_model_name(Path(policy.name)) if is_adapter(policy.name) else policy.name
    start = EngineConfig(
        model=base,
        dtype=engine_dtype(recipe),
        window=policy.context_window,
        remote=policy.trust_remote_code,
        lora_rank=rank,
        threads=torch.get_num_threads(),
        log=log,
        gpu_memory_utilization=_engine_memory(recipe),
        tensor_parallel_size=recipe.sampler.tensor_parallel_size,
        sleep_level=engine_sleep_level(recipe, policy),
        seeds_requests=seeds_requests(),
    )
    if recipe.sampler.server is not None:
        return ServerEngine(
            recipe.sampler.server,
            started_by=server_command(start),
            dtype=start.dtype,
            sleep_level=start.sleep_level,
            seeds_requests=start.seeds_requests,
        )
    return SubprocessEngine(start)


def engine_dtype(recipe: Recipe) -> str:
    """Return vLLM's name of the dtype of an engine's weights."""
    return "bfloat16" if recipe.model.dtype == "bf16" else "float32"


def engine_sleep_level(recipe: Recipe, policy: Policy) -> int:
    """Return vLLM's sleep level between sampling and the next sync; 0: the engine stays awake."""
    level = recipe.sampler.sleep_level
    if level == "auto":
        # with an adapter only that is sent: the base must survive in the host's memory
        return (1 if has_adapter(policy.lm) else 2) if shares_gpu(recipe) else 0
    if level == 2 and has_adapter(policy.lm):
        raise ConfigError(
            f"sampler.sleep_level is 2 and {policy.name} is an adapter: level 2 discards the "
            "engine's weights, and only the adapter is sent to it. Use sampler.sleep_level 1."
        )
    return level


def seeds_requests() -> bool:
    """Whether each completion has its own seed: on a CPU, or where vLLM is bitwise reproducible.

    On a GPU vLLM would leave its batched sampling for it, and the result would still depend on
    the batch in its last bits.
    """
    return not torch.cuda.is_available() or os.environ.get(BATCH_INVARIANT, "0") == "1"


def shares_gpu(recipe: Recipe) -> bool:
    """Whether an engine of the run is on a GPU that the learner trains on."""
    if recipe.cluster is not None or recipe.sampler.server is not None:
        return False
    is_learner_on_gpu = recipe.learner.shards > 1 or recipe.model.device != "cpu"
    return torch.cuda.is_available() and is_learner_on_gpu


def _engine_memory(recipe: Recipe) -> float | None:
    """Return the engine's fraction of GPU memory, less than vLLM's 0.9 on the learner's GPU."""
    if recipe.sampler.gpu_memory_utilization is not None:
        return recipe.sampler.gpu_memory_utilization
    return MEMORY_BESIDE_LEARNER if shares_gpu(recipe) else None


def refuse_missing_gpus(recipe: Recipe) -> None:
    """Refuse settings of an engine of the run that this machine has too few GPUs for."""
    sampler = recipe.sampler
    if sampler.server is not None:
        return
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if sampler.tensor_parallel_size > max(1, num_gpus):
        raise ConfigError(
            f"sampler.tensor_parallel_size is {sampler.tensor_parallel_size}, but an engine finds "
            f"{num_gpus} GPUs here. Use at most {max(1, num_gpus)}."
        )
    if sampler.sleep_level in (1, 2) and not num_gpus:
        raise ConfigError(
            f"sampler.sleep_level is {sampler.sleep_level}, but there is no GPU here whose memory "
            "an engine could release. Set sampler.sleep_level: auto."
        )
