"""The parts of a run, as its recipe describes them: policy, reference, learner, sampler."""

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
    """Return the policy as it starts, and where its weights can be found again.

    A start that is made here (a warm start, a merged adapter, the tiny model) is kept in the run:
    what is saved on top of it can then be loaded by anybody.
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
    """Whether what a run starts from is not yet in any folder."""
    adapter = is_adapter(recipe.model.name)
    if adapter and recipe.model.lora_rank is None and recipe.warm_start is not None:
        raise ConfigError(
            f"model.name is {recipe.model.name}, an adapter to train further, but warm_start "
            "trains every weight. Set model.lora_rank to merge the adapter, warm up the whole and "
            "train a fresh one, or leave warm_start out."
        )
    merged = adapter and recipe.model.lora_rank is not None
    return merged or recipe.warm_start is not None or recipe.model.name in BUILT_IN


def _make_start(start: Path, recipe: Recipe, source: Source, console: Console) -> None:
    """Write the model that a run starts from, every weight of it and no adapter beside it."""
    draft = start.with_name(f"{START}.unfinished")
    remove_tree(draft)
    if recipe.warm_start is None:
        make_fresh_folder(draft)
        save_model(draft, load_whole(recipe.model, temperature=1.0, seed=recipe.seed))
    else:
        warm_up(recipe, source, console).copy_to(draft)
    draft.rename(start)


def warm_up(recipe: Recipe, source: Source, console: Console) -> Cached:
    """Make the warm start of a recipe, or find it in the cache; return where it is."""
    # the same for all seeds, as a published checkpoint would be
    policy = load_whole(recipe.model, temperature=1.0, seed=0)
    with WarmStartProgress(console) as progress:
        return warm_start(policy, recipe, source.task, progress.tell)


def start_reference(recipe: Recipe, policy: Policy, where: str) -> Reference | None:
    """Return what the KL ties to; nothing is loaded or copied where no KL is asked for."""
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
    """Return which reference a run starts with, for run.json and checkpoints."""
    if reference is None:
        return {"kind": "none", "source": None, "digest": None}
    return {"kind": reference.kind, "source": reference.source, "digest": reference.digest}


def make_learner(
    recipe: Recipe, policy: Policy, reference: Reference | None, *, packed: bool = False
) -> LocalLearner:
    """Return the learner that the recipe describes, in this process."""
    objective, settings = learner_settings(recipe)
    settings = replace(settings, packed=packed)
    return LocalLearner(policy, reference, objective=objective, settings=settings)


def both_pack(policy: Policy, reference: Reference | None) -> bool:
    """Whether rows can lie end to end, for whoever reads them."""
    others = [] if reference is None else [reference.scorer]
    return all(packs(scorer) for scorer in (policy.scorer, *others))


def learner_settings(recipe: Recipe) -> tuple[Objective, Settings]:
    """Return what a learner minimises, and how."""
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
    """Return the sampler that the recipe describes; an engine writes to `log` what it says."""
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
    """Return a sampler that lets somebody reply to what the policy says, if somebody does."""
    if reply is None:
        return sampler
    encoder = PromptEncoder(policy.tokenizer, policy.name)
    return Conversing(sampler, encoder, reply, window=policy.context_window)


def _engine(recipe: Recipe, policy: Policy, log: Path | None) -> Any:
    """Return the vLLM engine that the recipe describes, started for what the policy is."""
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
