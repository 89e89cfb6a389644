"""Builds the policy, reference, learner and sampler that a recipe describes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from klinic.errors import ConfigError
from klinic.evidence.warm_start_status import WarmStartFile
from klinic.evidence.writing import make_fresh_folder, remove_tree
from klinic.learner.checkpoint import save_model
from klinic.learner.local import LocalLearner
from klinic.learner.objective import Objective, TeacherTerm
from klinic.learner.protocol import Learner
from klinic.learner.settings import LearnerSettings
from klinic.learner.update import LearningRate
from klinic.maths.importance import ImportanceSampling
from klinic.model.adapter_files import is_adapter
from klinic.model.chat import PromptEncoder
from klinic.model.loading import (
    BUILT_IN_MODELS,
    Policy,
    load_merged_policy,
    load_policy,
    load_scorer,
)
from klinic.model.moving_reference import make_moving_reference
from klinic.model.outline import load_outline
from klinic.model.reference import (
    Reference,
    ReferenceIdentity,
    make_reference,
    reference_at_start,
)
from klinic.model.scorer import supports_packing
from klinic.model.start_digests import StartDigests
from klinic.recipe.recipe import Recipe
from klinic.recipe.sections import ModelSection
from klinic.sampler.multi_turn import EnvironmentReply, MultiTurnSampler
from klinic.sampler.protocol import Sampler
from klinic.sampler.token_sampling import SamplingParams
from klinic.sampler.transformers import TransformersSampler
from klinic.trackers.console import WarmStartProgress
from klinic.training.build_engine import make_engine
from klinic.training.run_folder import START_FOLDER
from klinic.training.source import TaskData
from klinic.training.warm_start import CachedWarmStart, warm_start


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenIdentities:
    """The frozen models of a learner at the start; kind "none" where it has no such model."""

    reference: ReferenceIdentity
    teacher: ReferenceIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedLearner:
    """A learner with the identities of its models at the start."""

    learner: Learner
    policy: Policy
    digests: StartDigests
    frozen: FrozenIdentities


def start_policy(
    recipe: Recipe, folder: Path, task_data: TaskData, console: Console
) -> tuple[Policy, str]:
    """Return the start policy and the path or hub id of its weights."""
    section = start_section(recipe, folder, task_data, console)
    return load_start_policy(recipe, section, task_data), section.name


def load_start_policy(recipe: Recipe, section: ModelSection, task_data: TaskData) -> Policy:
    """Return the start policy; the base of one that ranks hold has no values in this process."""
    load = load_outline if recipe.learner.shards > 1 else load_policy
    return load(
        section,
        temperature=recipe.sampling.temperature,
        seed=recipe.seed,
        tokenizer=task_data.inputs.tokenizer,
    )


def start_section(
    recipe: Recipe, folder: Path, task_data: TaskData, console: Console
) -> ModelSection:
    """Return the `model` section of the start policy, with the path or hub id of its weights.

    A start model that exists in no folder yet (warm start, merged adapter, tiny model) is saved in
    the run folder, so that adapters and checkpoints based on it can be loaded elsewhere.
    """
    section = recipe.model
    if _needs_start_model(recipe):
        start = folder / START_FOLDER
        if not start.exists():
            _write_start_model(start, recipe, task_data, console)
        section = section.model_copy(update={"name": str(start)})
    if recipe.learner.shards > 1 or recipe.cluster is not None:
        # the ranks hold the weights; a single one in a cluster moves them to the GPU Ray gives it
        section = section.model_copy(update={"device": "cpu"})
    return section


def _needs_start_model(recipe: Recipe) -> bool:
    """Whether the start model must be built because no folder holds it yet."""
    adapter = is_adapter(recipe.model.name)
    if adapter and recipe.model.lora_rank is None and recipe.warm_start is not None:
        raise ConfigError(
            f"model.name is {recipe.model.name}, an adapter to train further, but warm_start "
            "trains every weight. Set model.lora_rank to merge the adapter, warm-start the merged "
            "model and train a new adapter, or remove warm_start."
        )
    merged = adapter and recipe.model.lora_rank is not None
    return merged or recipe.warm_start is not None or recipe.model.name in BUILT_IN_MODELS


def _write_start_model(start: Path, recipe: Recipe, task_data: TaskData, console: Console) -> None:
    """Write the start model with all its weights, without an adapter."""
    draft = start.with_name(f"{START_FOLDER}.unfinished")
    remove_tree(draft)
    if recipe.warm_start is None:
        make_fresh_folder(draft)
        save_model(draft, load_merged_policy(recipe.model, temperature=1.0, seed=recipe.seed))
    else:
        run_warm_start(recipe, task_data, console, folder=start.parent).copy_to(draft)
    draft.rename(start)


def run_warm_start(
    recipe: Recipe, task_data: TaskData, console: Console, *, folder: Path | None = None
) -> CachedWarmStart:
    """Run the warm start of a recipe, or take it from the cache; return its folder.

    `folder` is the run folder, where `klinic watch` reads the progress.
    """
    # the same for all seeds, like a published checkpoint
    policy = load_merged_policy(recipe.model, temperature=1.0, seed=0)
    status = WarmStartFile(folder)
    with WarmStartProgress(console) as progress:

        def report_progress(step: int, num_steps: int, loss: float) -> None:
            progress.show_progress(step, num_steps, loss)
            status.write(step, num_steps, loss)

        result = warm_start(policy, recipe, task_data.task, report_progress)
    status.remove()
    return result


def start_reference(
    recipe: Recipe, policy: Policy, weights_source: str, digests: StartDigests
) -> Reference | None:
    """Return the reference of the KL term; without a KL term, load and copy nothing.

    `digests` are those of the policy, empty on ranks other than 0.
    """
    kl = recipe.kl
    if kl is None or not kl.needs_reference:
        return None
    moves = recipe.reference.moves
    if path := recipe.reference.path:
        scorer = load_scorer(path, like=policy, seed=recipe.seed)
        reference = make_reference(
            scorer, source=path, weights_digest=digests.of_other(scorer.lm.state_dict())
        )
    else:
        reference = reference_at_start(
            policy.scorer, source=weights_source, moves=moves, digests=digests
        )
    return (
        make_moving_reference(policy.scorer, reference, source=weights_source)
        if moves
        else reference
    )


def start_teacher(recipe: Recipe, policy: Policy, digests: StartDigests) -> Reference | None:
    """Return the frozen teacher of a recipe, None without one."""
    if recipe.teacher is None:
        return None
    path = recipe.teacher.path
    scorer = load_scorer(path, like=policy, seed=recipe.seed, key="teacher.path", may_pad=True)
    weights_digest = digests.of_other(scorer.lm.state_dict())
    return make_reference(scorer, source=path, weights_digest=weights_digest)


def reference_identity(reference: Reference | None) -> ReferenceIdentity:
    """Return kind, source and digest of the start reference, for run.json and checkpoints."""
    if reference is None:
        return {"kind": "none", "source": None, "digest": None}
    return {"kind": reference.kind, "source": reference.source, "digest": reference.digest}


def frozen_identities(reference: Reference | None, teacher: Reference | None) -> FrozenIdentities:
    """Return the identities of reference and teacher."""
    return FrozenIdentities(
        reference=reference_identity(reference), teacher=reference_identity(teacher)
    )


def make_learner(
    recipe: Recipe,
    policy: Policy,
    reference: Reference | None,
    *,
    teacher: Reference | None = None,
    packed: bool = False,
) -> LocalLearner:
    """Return the single-process learner of a recipe."""
    objective, settings = learner_settings(recipe)
    settings = replace(settings, packed=packed)
    return LocalLearner(policy, reference, objective=objective, settings=settings, teacher=teacher)


def can_pack_rows(policy: Policy, *frozen: Reference | None) -> bool:
    """Whether policy, reference and teacher all accept packed (concatenated) rows."""
    frozen_scorers = [model.scorer for model in frozen if model is not None]
    return all(supports_packing(scorer) for scorer in (policy.scorer, *frozen_scorers))


def learner_settings(recipe: Recipe) -> tuple[Objective, LearnerSettings]:
    """Return the objective of a learner and its optimization settings."""
    learner, mode = recipe.learner, recipe.importance_sampling
    objective = Objective(
        loss=learner.loss,
        estimator=None if recipe.kl is None else recipe.kl.estimator,
        clip_low=learner.clip_low,
        clip_high=learner.clip_high,
        mask_truncated=learner.mask_truncated,
        max_new_tokens=recipe.sampling.max_new_tokens,
        importance_sampling=ImportanceSampling(
            mode=mode or "token_truncate", cap=learner.importance_sampling_cap
        ),
        corrects_policy_term=mode is not None,
        teacher=None
        if recipe.teacher is None
        else TeacherTerm(
            estimator=recipe.teacher.estimator,
            coef=recipe.teacher.coef,
            alone=recipe.teacher.alone,
        ),
    )
    settings = LearnerSettings(
        learning_rate=LearningRate(
            peak=learner.learning_rate,
            schedule=learner.schedule,
            warmup_steps=learner.warmup_steps * learner.updates_per_batch,
            total_steps=recipe.loop.max_steps * learner.updates_per_batch,
        ),
        weight_decay=learner.weight_decay,
        adam_betas=(learner.adam_beta1, learner.adam_beta2),
        max_grad_norm=learner.max_grad_norm,
        micro_batch_size=learner.micro_batch_size,
        updates_per_batch=learner.updates_per_batch,
        filters=sampling_params(recipe),
    )
    return objective, settings


def sampling_params(recipe: Recipe) -> SamplingParams:
    """Return temperature and filters of a recipe."""
    sampling = recipe.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
    )


def sampler_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that all samplers have."""
    return {
        "params": sampling_params(recipe),
        "max_new_tokens": recipe.sampling.max_new_tokens,
        "group_size": recipe.loop.group_size,
        "seed": recipe.seed,
    }


def make_sampler(
    recipe: Recipe, policy: Policy, learner: Learner, log: Path | None = None
) -> Sampler:
    """Return the sampler of a recipe, on the learner's weights.

    A vLLM engine writes its output to `log`.
    """
    settings = sampler_settings(recipe)
    if recipe.sampler.type == "vllm":
        from klinic.sampler.vllm.sampler import VllmSampler

        return VllmSampler(policy, learner, make_engine(recipe, policy, log), **settings)
    if recipe.learner.shards > 1:
        from klinic.training.sharded_sampler import make_sharded_sampler

        return make_sharded_sampler(learner, settings)
    return TransformersSampler(policy, **settings)


def wrap_multi_turn(sampler: Sampler, policy: Policy, reply: EnvironmentReply | None) -> Sampler:
    """Return a multi-turn sampler if there is a reply function, else the sampler itself."""
    if reply is None:
        return sampler
    encoder = PromptEncoder(policy.tokenizer, policy.name)
    return MultiTurnSampler(sampler, encoder, reply, window=policy.context_window)
