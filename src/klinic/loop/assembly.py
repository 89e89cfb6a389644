"""Builds the policy, reference, learner and sampler that a recipe describes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from klinic.errors import ConfigError
from klinic.evidence.writing import make_fresh_folder, remove_tree
from klinic.learner.checkpoint import save_model
from klinic.learner.local import LocalLearner, Settings
from klinic.learner.objective import Objective
from klinic.learner.update import LearningRate
from klinic.loop.folder import START
from klinic.loop.source import Source
from klinic.loop.trackers.console import WarmStartProgress
from klinic.loop.warm_start import Cached, warm_start
from klinic.model.adapter_files import base_of, is_adapter
from klinic.model.adapters import is_adapted
from klinic.model.chat import PromptEncoder
from klinic.model.loading import BUILT_IN, Policy, load_policy, load_scorer, load_whole
from klinic.model.moving_reference import moving
from klinic.model.packed import packs
from klinic.model.reference import Reference, as_it_starts, frozen
from klinic.recipe.recipe import Recipe
from klinic.sampler.conversation import Conversing, Reply
from klinic.sampler.drawing import Drawing
from klinic.sampler.protocol import Sampler
from klinic.sampler.transformers import TransformersSampler


def start_policy(
    recipe: Recipe, folder: Path, source: Source, console: Console
) -> tuple[Policy, str]:
    """Return the start policy and the path or hub id of its weights.

    A start model that exists in no folder yet (warm start, merged adapter, tiny model) is saved in
    the run folder, so that adapters and checkpoints based on it can be loaded elsewhere.
    """
    how: dict[str, Any] = {"temperature": recipe.sampling.temperature, "seed": recipe.seed}
    if not _is_made(recipe):
        return load_policy(recipe.model, **how), recipe.model.name
    start = folder / START
    if not start.exists():
        _make_start(start, recipe, source, console)
    section = recipe.model.model_copy(update={"name": str(start)})
    return load_policy(section, **how), str(start)


def _is_made(recipe: Recipe) -> bool:
    """Whether the start model must be built because no folder holds it yet."""
    adapter = is_adapter(recipe.model.name)
    if adapter and recipe.model.lora_rank is None and recipe.warm_start is not None:
        raise ConfigError(
            f"model.name is {recipe.model.name}, an adapter to train further, but warm_start "
            "trains every weight. Set model.lora_rank to merge the adapter, warm-start the merged "
            "model and train a new adapter, or remove warm_start."
        )
    merged = adapter and recipe.model.lora_rank is not None
    return merged or recipe.warm_start is not None or recipe.model.name in BUILT_IN


def _make_start(start: Path, recipe: Recipe, source: Source, console: Console) -> None:
    """Write the start model with all its weights, without an adapter."""
    draft = start.with_name(f"{START}.unfinished")
    remove_tree(draft)
    if recipe.warm_start is None:
        make_fresh_folder(draft)
        save_model(draft, load_whole(recipe.model, temperature=1.0, seed=recipe.seed))
    else:
        warm_up(recipe, source, console).copy_to(draft)
    draft.rename(start)


def warm_up(recipe: Recipe, source: Source, console: Console) -> Cached:
    """Run the warm start of a recipe, or take it from the cache; return its folder."""
    # the same for all seeds, like a published checkpoint
    policy = load_whole(recipe.model, temperature=1.0, seed=0)
    with WarmStartProgress(console) as progress:
        return warm_start(policy, recipe, source.task, progress.tell)


def start_reference(recipe: Recipe, policy: Policy, where: str) -> Reference | None:
    """Return the reference of the KL term; without a KL term, load and copy nothing."""
    kl = recipe.kl
    if kl is None or not kl.needs_reference:
        return None
    moves = recipe.reference.moves
    if path := recipe.reference.path:
        reference = frozen(load_scorer(path, like=policy, seed=recipe.seed), source=path)
    else:
        reference = as_it_starts(policy.scorer, source=where, moves=moves)
    return moving(policy.scorer, reference, source=where) if moves else reference


def identity(reference: Reference | None) -> dict[str, Any]:
    """Return kind, source and digest of the start reference, for run.json and checkpoints."""
    if reference is None:
        return {"kind": "none", "source": None, "digest": None}
    return {"kind": reference.kind, "source": reference.source, "digest": reference.digest}


def make_learner(
    recipe: Recipe, policy: Policy, reference: Reference | None, *, packed: bool = False
) -> LocalLearner:
    """Return the single-process learner of a recipe."""
    objective, settings = learner_settings(recipe)
    settings = replace(settings, packed=packed)
    return LocalLearner(policy, reference, objective=objective, settings=settings)


def both_pack(policy: Policy, reference: Reference | None) -> bool:
    """Whether policy and reference both accept packed (concatenated) rows."""
    others = [] if reference is None else [reference.scorer]
    return all(packs(scorer) for scorer in (policy.scorer, *others))


def learner_settings(recipe: Recipe) -> tuple[Objective, Settings]:
    """Return the objective of a learner and its optimization settings."""
    learner = recipe.learner
    objective = Objective(
        loss=learner.loss,
        estimator=None if recipe.kl is None else recipe.kl.estimator,
        clip_low=learner.clip_low,
        clip_high=learner.clip_high,
        mask_truncated=learner.mask_truncated,
        max_new_tokens=recipe.sampling.max_new_tokens,
        corrects=recipe.max_staleness > 0,
    )
    settings = Settings(
        rate=LearningRate(
            peak=learner.learning_rate,
            schedule=learner.schedule,
            warmup_steps=learner.warmup_steps * learner.updates_per_batch,
            total_steps=recipe.loop.max_steps * learner.updates_per_batch,
        ),
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_grad_norm,
        micro_batch_size=learner.micro_batch_size,
        updates_per_batch=learner.updates_per_batch,
    )
    return objective, settings


def make_sampler(recipe: Recipe, policy: Policy, log: Path | None = None) -> Sampler:
    """Return the sampler of a recipe; a vLLM engine writes its output to `log`."""
    s = recipe.sampling
    how: dict[str, Any] = {
        "how": Drawing(temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, min_p=s.min_p),
        "max_new_tokens": s.max_new_tokens,
        "group_size": recipe.loop.group_size,
        "seed": recipe.seed,
    }
    if recipe.sampler.type == "vllm":
        from klinic.sampler.vllm import VllmSampler

        return VllmSampler(policy, _engine(recipe, policy, log), **how)
    return TransformersSampler(policy, **how)


def conversing(sampler: Sampler, policy: Policy, reply: Reply | None) -> Sampler:
    """Return a multi-turn sampler if there is a reply function, else the sampler itself."""
    if reply is None:
        return sampler
    encoder = PromptEncoder(policy.tokenizer, policy.name)
    return Conversing(sampler, encoder, reply, window=policy.context_window)


def _engine(recipe: Recipe, policy: Policy, log: Path | None) -> Any:
    """Return the vLLM engine of a recipe, configured for the policy."""
    from klinic.sampler.vllm_engine import OwnEngine, Start
    from klinic.sampler.vllm_server import ServedEngine, command

    lm = policy.lm
    rank = max(config.r for config in lm.peft_config.values()) if is_adapted(lm) else None
    base = base_of(Path(policy.name)) if is_adapter(policy.name) else policy.name
    dtype = "bfloat16" if recipe.model.dtype == "bf16" else "float32"
    start = Start(
        model=base,
        dtype=dtype,
        window=policy.context_window,
        remote=policy.remote,
        lora_rank=rank,
        threads=torch.get_num_threads(),
        log=log,
    )
    if recipe.sampler.server is not None:
        return ServedEngine(recipe.sampler.server, started_by=command(start))
    return OwnEngine(start)
