"""The `Recipe` model: all sections of a run, and the checks across sections."""

from collections.abc import Iterator
from typing import Any

from pydantic import model_validator

from klinic.errors import ConfigError
from klinic.maths.importance import Mode
from klinic.maths.kl_estimators import ESTIMATORS, Gradient
from klinic.maths.surrogate import SURROGATES
from klinic.recipe.rewards import Rewards
from klinic.recipe.section import Count, Section, Seed
from klinic.recipe.sections import (
    ClusterSection,
    DataSection,
    EvalSection,
    KLSection,
    LearnerSection,
    LoopSection,
    ModelSection,
    OutputSection,
    RecoverySection,
    ReferenceSection,
    RetentionSection,
    SamplerSection,
    SamplingSection,
    TeacherSection,
    WarmStartSection,
)


class Recipe(Section):
    """All settings of a run, validated section by section and together."""

    seed: Seed = 0
    """Seed of all random generators; the same recipe and seed give the same run."""
    threads: Count | None = None
    """CPU threads of torch; null: all cores, and one for the tiny model."""
    model: ModelSection
    """The policy to train."""
    data: DataSection
    """The source of prompts."""
    rewards: Rewards = ()
    """Reward functions; empty: the task's own reward."""
    eval: EvalSection | None = None
    """Held-out prompts of a dataset; a task has its own."""
    retention: RetentionSection | None = None
    """Prompts of other skills; a task has its own."""
    kl: KLSection | None = None
    """The KL term to the reference; absent: no KL and no reference."""
    reference: ReferenceSection = ReferenceSection()
    """The reference policy, and whether it is updated."""
    teacher: TeacherSection | None = None
    """The KL term to a teacher; absent: none."""
    sampling: SamplingSection = SamplingSection()
    """Sampling parameters of completions."""
    sampler: SamplerSection = SamplerSection()
    """The engine that samples completions."""
    cluster: ClusterSection | None = None
    """Ray processes; absent: none. A single machine needs none."""
    loop: LoopSection = LoopSection()
    """Number of steps, batch size, evaluation and checkpoints."""
    learner: LearnerSection = LearnerSection()
    """The loss and the optimizer."""
    recovery: RecoverySection | None = RecoverySection()
    """Limits that define an anomaly, and the response; null only discards non-finite updates."""
    warm_start: WarmStartSection | None = None
    """Supervised training before the first step; absent: none."""
    output: OutputSection = OutputSection()
    """Run folder, metrics sinks, records and doctor."""

    @model_validator(mode="after")
    def _check_sections(self) -> "Recipe":
        problems = [
            *_check_kl_loss(self),
            *_check_teacher(self),
            *_check_warm_start(self),
            *_check_rewards(self),
            *_check_held_out(self),
            *_check_overlong_buffer(self),
            *_check_reference(self),
            *_check_kl_limit(self),
            *_check_shards(self),
            *_check_attention(self),
            *_check_server(self),
            *_check_engine(self),
            *_check_cluster(self),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def max_staleness(self) -> int:
        """Steps by which sampling may run ahead of training; 0 without a cluster."""
        return 0 if self.cluster is None else self.cluster.max_staleness

    @property
    def importance_sampling(self) -> Mode | None:
        """How the policy term is weighted, None for not at all; `auto` is resolved."""
        match self.learner.importance_sampling:
            case "auto":
                return "token_truncate" if self.max_staleness else None
            case "none":
                return None
            case mode:
                return mode

    def explicit_values(self) -> dict[str, Any]:
        """Return the explicitly set values as JSON values, for another process to validate."""
        return self.model_dump(mode="json", exclude_unset=True)

    def sizes(self) -> str:
        """Describe the batch sizes of one step.

        >>> recipe = Recipe(model=ModelSection(name="tiny"), data=DataSection(task="arithmetic"))
        >>> recipe.sizes()
        '8 prompts x 8 completions = 64 per step, 8 micro-batches of 8'
        """
        prompts, group = self.loop.prompts_per_step, self.loop.group_size
        rows = prompts * group
        micro = min(self.learner.micro_batch_size, rows)
        num_micro = -(-rows // micro)
        plural = "es" if num_micro > 1 else ""
        most = "at most " if rows % micro else ""
        updates = self.learner.updates_per_batch
        again = f", {updates} updates on them" if updates > 1 else ""
        return (
            f"{prompts} prompt{'s' if prompts > 1 else ''} x {group} completions = {rows} per step"
            f", {num_micro} micro-batch{plural} of {most}{micro}{again}"
        )


def check_complete(recipe: Recipe, *, has_reward_functions: bool = False) -> None:
    """Raise ConfigError if neither the recipe nor a Python function provides a reward."""
    if recipe.data.task is None and not recipe.rewards and not has_reward_functions:
        raise ConfigError(
            f"rewards is empty and data.path is {recipe.data.path}: only a task brings its own "
            "reward. Add a reward function, such as rewards: [my_rewards.py:correct]"
        )


def _check_kl_loss(recipe: Recipe) -> Iterator[str]:
    loss = recipe.learner.loss
    if SURROGATES[loss].aggregation != "sequence_mean":
        return
    for name, section in (("kl", recipe.kl), ("teacher", recipe.teacher)):
        if section is not None and section.estimator == "sequence":
            yield (
                f"{name}.estimator is sequence with learner.loss {loss}: this loss divides by the "
                "length of each completion, so longer completions would lower the KL. Use "
                f"learner.loss dr_grpo, bnpo, dapo or cispo, or {name}.estimator unbiased."
            )


def _check_teacher(recipe: Recipe) -> Iterator[str]:
    teacher = recipe.teacher
    if teacher is None:
        return
    if ESTIMATORS[teacher.estimator].gradient is Gradient.ZERO:
        yield (
            f"teacher.estimator is {teacher.estimator}: its expected gradient is zero, so the "
            "policy would not approach the teacher. Use teacher.estimator exact or unbiased."
        )
    if teacher.alone and recipe.learner.reward_warmup_steps:
        yield (
            f"learner.reward_warmup_steps is {recipe.learner.reward_warmup_steps} with "
            "teacher.alone: rewards have no gradient to warm up. Remove one of them."
        )


def _check_warm_start(recipe: Recipe) -> Iterator[str]:
    warm_start = recipe.warm_start
    if warm_start is not None and warm_start.path is None and recipe.data.task is None:
        yield (
            "warm_start has no examples: warm_start.path is null, and only a task brings its own. "
            "Set warm_start.path to a JSONL file with `prompt` and `completion`, or remove "
            "warm_start."
        )


def _check_rewards(recipe: Recipe) -> Iterator[str]:
    if recipe.data.task is not None:
        return
    for name, rewards in _all_rewards(recipe):
        for index, entry in enumerate(rewards):
            if ":" in entry.function:
                continue
            yield (
                f"{name}[{index}].function is {entry.function!r}: without data.task there is no "
                "reward of that name. Write module:function or file.py:function."
            )


def _all_rewards(recipe: Recipe) -> Iterator[tuple[str, Rewards]]:
    yield "rewards", recipe.rewards
    if recipe.eval is not None:
        yield "eval.rewards", recipe.eval.rewards
    if recipe.retention is not None:
        yield "retention.rewards", recipe.retention.rewards


def _check_held_out(recipe: Recipe) -> Iterator[str]:
    if recipe.data.task is None:
        return
    for name in ("eval", "retention"):
        if getattr(recipe, name) is not None:
            yield (
                f"{name} does not apply to data.task: a task has its own held-out questions for "
                f"every skill. Remove {name}, or use data.path."
            )


def _check_overlong_buffer(recipe: Recipe) -> Iterator[str]:
    buffer, limit = recipe.learner.overlong_buffer, recipe.sampling.max_new_tokens
    if buffer > limit:
        yield (
            f"learner.overlong_buffer is {buffer} with sampling.max_new_tokens {limit}: even an "
            f"empty completion would be penalised. Use at most {limit}."
        )


def _check_reference(recipe: Recipe) -> Iterator[str]:
    if recipe.kl is None and recipe.reference != ReferenceSection():
        yield (
            "reference is set, but kl is not: without a KL the reference is not used. Add kl (coef "
            "0 with monitor_every only measures it), or remove reference."
        )
    is_policy = recipe.reference.reset_every == 1 and not recipe.reference.on_plateau
    has_kl = recipe.kl is not None and recipe.kl.coef > 0
    if is_policy and has_kl and recipe.learner.updates_per_batch == 1:
        yield (
            "reference.reset_every is 1 with one update a batch: the reference is the policy in "
            "every update, so the KL and its gradient are 0 whatever kl.coef is. Set "
            "reference.reset_every to 2 or more, learner.updates_per_batch to 2 or more (later "
            "updates of a batch are then tied to its first), or kl: null."
        )


def _check_server(recipe: Recipe) -> Iterator[str]:
    if recipe.sampler.server is not None and recipe.sampler.type != "vllm":
        yield (
            f"sampler.server is {recipe.sampler.server} with sampler.type {recipe.sampler.type}: "
            "only vllm uses a server. Set sampler.type vllm, or remove sampler.server."
        )


def _check_engine(recipe: Recipe) -> Iterator[str]:
    sampler = recipe.sampler
    if sampler.type != "vllm":
        for name, default in (("sleep_level", "auto"), ("tensor_parallel_size", 1)):
            if (value := getattr(sampler, name)) not in (default, 0):
                yield (
                    f"sampler.{name} is {value} with sampler.type {sampler.type}, which has no "
                    f"engine. Set sampler.type vllm, or remove sampler.{name}."
                )
    elif sampler.sleep_level in (1, 2) and recipe.cluster is not None:
        yield (
            f"sampler.sleep_level is {sampler.sleep_level} and there is a cluster: its samplers "
            "have GPUs of their own, so nothing needs their memory. Remove sampler.sleep_level."
        )
    elif sampler.sleep_level == 2 and recipe.model.lora_rank is not None:
        yield (
            "sampler.sleep_level is 2 with model.lora_rank: level 2 discards the engine's weights, "
            "and only the adapter is sent to it. Use sampler.sleep_level 1."
        )


def _check_cluster(recipe: Recipe) -> Iterator[str]:
    if recipe.cluster is not None and recipe.sampler.server is not None:
        yield (
            f"sampler.server is {recipe.sampler.server} and there is a cluster: its samplers have "
            "engines of their own. Remove sampler.server or cluster."
        )


def _check_shards(recipe: Recipe) -> Iterator[str]:
    shards = recipe.learner.shards
    if shards == 1:
        if recipe.learner.replicas > 1:
            yield (
                f"learner.replicas is {recipe.learner.replicas} with learner.shards 1: only a "
                "sharded learner has replicas. Set learner.shards to 2 or more, or "
                "learner.replicas to 1."
            )
        return
    if recipe.reference.moves:
        yield (
            f"learner.shards is {shards} and the reference moves: FSDP does not support a moving "
            "reference. Remove reference.ema and reference.reset_every, or use learner.shards 1."
        )
    if recipe.teacher is not None:
        yield (
            f"learner.shards is {shards} with a teacher: a sharded teacher is not verified. Use "
            "learner.shards 1, or remove teacher."
        )
    if recipe.model.compile:
        yield (
            f"learner.shards is {shards} with model.compile: FSDP with a compiled model is not "
            "verified. Remove one of them."
        )


def _check_attention(recipe: Recipe) -> Iterator[str]:
    several = recipe.learner.shards > 1 or recipe.cluster is not None
    if several and recipe.model.attention in ("flash_attention_2", "flex_attention"):
        yield (
            f"model.attention is {recipe.model.attention} with several processes: their models are "
            "loaded on the CPU, which has no such kernel. Set model.attention: auto."
        )


def _check_kl_limit(recipe: Recipe) -> Iterator[str]:
    limit = None if recipe.recovery is None else recipe.recovery.kl_limit
    if limit is not None and (recipe.kl is None or not recipe.kl.needs_reference):
        yield (
            f"recovery.kl_limit is {limit}, but no KL is measured: kl is off, or its coef is 0. "
            "Set kl.coef, or kl.coef 0 with kl.monitor_every 1 to only measure it."
        )
