"""A small policy, what vLLM is started with for it, and what is asked of it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from klinic.evidence.rollout import Prompt, flatten_rollouts
from klinic.learner.checkpoint import save_model
from klinic.model.layout import pad_rows
from klinic.model.loading import load_policy
from klinic.model.policy_source import PolicySource
from klinic.model.weights import Weights, fingerprint
from klinic.recipe.sections import ModelSection
from klinic.sampler.token_sampling import SamplingParams
from klinic.sampler.vllm.engine import EngineConfig
from klinic.sampler.vllm.sampler import VllmSampler

HOT = 1.3  # a temperature at which raw log-probs are others than processed ones
GAP = 1e-4  # nats, mean: the most that two engines in fp32 may differ by


def section(name, rank=None):
    return ModelSection(name=str(name), lora_rank=rank)


def tiny(folder: Path) -> Path:
    save_model(folder, load_policy(section("tiny"), temperature=1.0, seed=0))
    return folder


def start(model: Path, rank: int | None = None) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        dtype="float32",
        window=512,
        remote=False,
        lora_rank=rank,
        threads=1,
        log=model.parent / "vllm.log",
    )


def sampler_of(policy, engine, *, temperature=1.0, **filters):
    how = SamplingParams(temperature=temperature, **filters)
    return VllmSampler(
        policy,
        PolicySource(policy),
        engine,
        params=how,
        max_new_tokens=12,
        group_size=2,
        seed=5,
    )


def moved(policy, by=0.02):
    """Move every weight that is trained, as an update would."""
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for p in policy.lm.parameters():
            if p.requires_grad:
                p.add_(by * torch.randn_like(p))


def loaded(sampler, policy, version):
    told = Weights(version=version, fingerprint=fingerprint(policy.lm), location="process")
    return sampler.load(told)


def prompts(num=3, length=70):
    stream = np.random.default_rng(2)
    return [
        Prompt(index=i, text="", token_ids=stream.integers(3, 50, length), columns={})
        for i in range(num)
    ]


def gap_of(policy, groups, filters=None):
    """Return the mean distance of the log-probs of engine and learner, under the same filters."""
    record = flatten_rollouts([rollout for group in groups for rollout in group], step=1)
    split = np.split(record.token_ids, record.row_offsets[1:-1])
    before = np.split(record.prompt_ids, record.prompt_offsets[1:-1])
    layout = pad_rows(before, split, pad_id=0, device=torch.device("cpu"))
    if filters is not None:
        layout = replace(layout, kept=policy.scorer.kept_tokens(layout, filters))
    with torch.no_grad():
        logp = policy.scorer(layout).logp.numpy()
    return float(np.abs(logp - record.logp_sampler).mean())
