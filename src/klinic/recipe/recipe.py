"""A recipe: everything a run is asked to do, in sections."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import model_validator

from klinic.errors import ConfigError
from klinic.maths.surrogate import SURROGATES
from klinic.recipe.cluster import ClusterSection
from klinic.recipe.data import DataSection
from klinic.recipe.held_out import EvalSection, RetentionSection
from klinic.recipe.kl import KLSection
from klinic.recipe.learner import LearnerSection
from klinic.recipe.loop import LoopSection
from klinic.recipe.model import ModelSection
from klinic.recipe.output import OutputSection
from klinic.recipe.recovery import RecoverySection
from klinic.recipe.reference import ReferenceSection
from klinic.recipe.rewards import Rewards
from klinic.recipe.sampler import SamplerSection
from klinic.recipe.sampling import SamplingSection
from klinic.recipe.section import Count, Section, within
from klinic.recipe.warm_start import WarmStartSection

LARGEST_SEED = 2**63 - 1  # what a 64-bit random generator takes


class Recipe(Section):
    """All sections of a run, each alone and all together known to be possible."""

    seed: Annotated[int, within("it starts a random stream", low=0, high=LARGEST_SEED)] = 0
    """Start of every random stream; the same recipe and seed give the same run."""
    threads: Count | None = None
    """CPU threads of torch; null is all cores, and one for the tiny model."""
    model: ModelSection
    """Which policy is trained."""
    data: DataSection
    """Where prompts come from."""
    rewards: Rewards = ()
    """What a completion is worth; none is the task's own reward."""
    eval: EvalSection | None = None
    """Held-out prompts; absent is none, and a task has its own."""
    retention: RetentionSection | None = None
    """Prompts of something else; absent is none, and a task has other skills."""
    kl: KLSection | None = None
    """The tie to the reference; absent is no KL and no reference."""
    reference: ReferenceSection = ReferenceSection()
    """Which policy the KL ties to, and whether it moves."""
    sampling: SamplingSection = SamplingSection()
    """How completions are drawn."""
    sampler: SamplerSection = SamplerSection()
    """What draws them."""
    cluster: ClusterSection | None = None
    """Processes that Ray starts; absent is none, and one machine needs none."""
    loop: LoopSection = LoopSection()
    """How many steps, over how much."""
    learner: LearnerSection = LearnerSection()
    """The loss and the optimiser."""
    recovery: RecoverySection | None = RecoverySection()
    """What counts as trouble, and what is done about it; null only discards NaN updates."""
    warm_start: WarmStartSection | None = None
    """Supervised training first; absent is none."""
    output: OutputSection = OutputSection()
    """What the run leaves behind."""

    @model_validator(mode="after")
    def _sections_fit(self) -> "Recipe":
        problems = [
            *_kl_against_loss(self),
            *_warm_start_has_rows(self),
            *_rewards_exist(self),
            *_held_out_is_free(self),
            *_buffer_fits(self),
            *_reference_is_used(self),
            *_limits_can_be_seen(self),
            *_shards_fit(self),
            *_server_is_used(self),
            *_cluster_fits(self),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def max_staleness(self) -> int:
        """Steps by which sampling may run ahead of training; 0 without a cluster."""
        return 0 if self.cluster is None else self.cluster.max_staleness

    def plain(self) -> dict[str, Any]:
        """Return what was asked for as plain values, for another process to validate."""
        return self.model_dump(mode="json", exclude_unset=True)

    def sizes(self) -> str:
        """Return what one step computes, in words.

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
    """Refuse a recipe that nobody gave a reward, neither in it nor as a function from Python."""
    if recipe.data.task is None and not recipe.rewards and not has_reward_functions:
        raise ConfigError(
            f"rewards is empty and data.path is {recipe.data.path}: a dataset of your own has no "
            "reward, so nothing could be learnt. Add one, such as rewards: [my_rewards.py:correct]"
        )


def _kl_against_loss(recipe: Recipe) -> Iterator[str]:
    if recipe.kl is None or recipe.kl.estimator != "sequence":
        return
    loss = recipe.learner.loss
    if SURROGATES[loss].aggregation == "sequence_mean":
        yield (
            f"kl.estimator is sequence with learner.loss {loss}: it divides by the length of each "
            "completion, so a longer one would be a way to lower the KL. Use learner.loss dr_grpo, "
            "bnpo, dapo or cispo, or kl.estimator unbiased."
        )


def _warm_start_has_rows(recipe: Recipe) -> Iterator[str]:
    warm_start = recipe.warm_start
    if warm_start is not None and warm_start.path is None and recipe.data.task is None:
        yield (
            "warm_start has no examples: warm_start.path is null, and only a task brings its own. "
            "Set warm_start.path to a JSONL file with `prompt` and `completion`, or leave "
            "warm_start out."
        )


def _rewards_exist(recipe: Recipe) -> Iterator[str]:
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


def _held_out_is_free(recipe: Recipe) -> Iterator[str]:
    if recipe.data.task is None:
        return
    for name in ("eval", "retention"):
        if getattr(recipe, name) is not None:
            yield (
                f"{name} does not go with data.task: a task holds out questions of its own, of the "
                f"skill that is trained and of the others. Leave {name} out, or use data.path."
            )


def _buffer_fits(recipe: Recipe) -> Iterator[str]:
    buffer, limit = recipe.learner.overlong_buffer, recipe.sampling.max_new_tokens
    if buffer > limit:
        yield (
            f"learner.overlong_buffer is {buffer} with sampling.max_new_tokens {limit}: even an "
            f"empty completion would be too long. Use at most {limit}."
        )


def _reference_is_used(recipe: Recipe) -> Iterator[str]:
    if recipe.kl is None and recipe.reference != ReferenceSection():
        yield (
            "reference is given, but kl is not: without a KL nothing is compared with a reference. "
            "Add kl, with coef 0 and monitor_every to only look, or leave reference out."
        )


def _server_is_used(recipe: Recipe) -> Iterator[str]:
    if recipe.sampler.server is not None and recipe.sampler.type != "vllm":
        yield (
            f"sampler.server is {recipe.sampler.server} with sampler.type {recipe.sampler.type}: "
            "only vllm has a server. Set sampler.type vllm, or leave sampler.server out."
        )


def _cluster_fits(recipe: Recipe) -> Iterator[str]:
    if recipe.cluster is not None and recipe.sampler.server is not None:
        yield (
            f"sampler.server is {recipe.sampler.server} and there is a cluster: its samplers have "
            "engines of their own. Leave sampler.server out, or cluster."
        )


def _shards_fit(recipe: Recipe) -> Iterator[str]:
    shards = recipe.learner.shards
    if shards == 1:
        return
    if recipe.reference.moves:
        yield (
            f"learner.shards is {shards} and the reference moves: that is not built for several "
            "processes. Leave reference.ema and reference.reset_every out, or use learner.shards 1."
        )
    if recipe.model.compile:
        yield (
            f"learner.shards is {shards} with model.compile: a compiled model that is gathered "
            "layer by layer has not been proven right. Leave one of them out."
        )


def _limits_can_be_seen(recipe: Recipe) -> Iterator[str]:
    limit = None if recipe.recovery is None else recipe.recovery.kl_limit
    if limit is not None and (recipe.kl is None or not recipe.kl.needs_reference):
        yield (
            f"recovery.kl_limit is {limit}, but no KL is measured: kl is off, or its coef is 0. "
            "Set kl.coef, or kl.coef 0 with kl.monitor_every 1 to only look."
        )
