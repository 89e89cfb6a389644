"""Forecasts memory, sizes and cost of a recipe by running one step on meta tensors.

The step uses the real learner, sampler and autograd. Every prompt has the longest length and every
completion the maximum length. Steps and micro-batches repeat from the second on, so the second and
the third are extrapolated to the last.

Sizes, compute, traffic and disk use are those of a step at its largest.
"""

import gc
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from klinic.capacity import memory
from klinic.capacity.bytes_moved import sent_bytes, stored_bytes, sync_bytes
from klinic.capacity.flops import DecoderShape, StepFlops, StepSizes, decoder_shape, step_flops
from klinic.capacity.memory import BF16_BYTES, FP32_BYTES, Phase, extrapolate_bytes
from klinic.capacity.meta_policy import MetaPolicy, build_meta_policy
from klinic.capacity.meta_ranks import sharded_learner
from klinic.capacity.prompt_lengths import PromptLengths, find_prompt_lengths
from klinic.capacity.throughput import Accelerator, DeviceSplit, best_split
from klinic.evidence.record import EmittedBy, StepRecord
from klinic.evidence.rollout import Prompt, Rollout, Segment, flatten_rollouts
from klinic.learner.diagnostics import EARLY_INTERVAL, diagnostic_fraction
from klinic.learner.local import LocalLearner
from klinic.learner.protocol import LossScales
from klinic.learner.scored_batch import ScoredBatch
from klinic.maths.kl_coef import KLCoefState
from klinic.model.token_filters import NO_FILTERS
from klinic.recipe.recipe import Recipe
from klinic.sampler.decoding import Stream, decode
from klinic.sampler.token_sampling import GREEDY, SamplingParams
from klinic.training.build import learner_settings, sampling_params
from klinic.training.evaluation import EVAL_BATCH_SIZE
from klinic.training.state import LoopState
from klinic.training.step import needs_reference


def step_sizes(
    recipe: Recipe, lengths: PromptLengths, *, uses_reference: bool, has_kl_term: bool
) -> StepSizes:
    """Return the sizes of a step after the first.

    `uses_reference` is whether the reference is scored, `has_kl_term` whether the loss has a KL
    term.
    """
    objective, settings = learner_settings(recipe)
    needs_vocabulary = has_kl_term and objective.needs_vocabulary
    keeps_top = needs_vocabulary and settings.stores_top_k(objective)
    return StepSizes(
        prompts=recipe.loop.prompts_per_step,
        group=recipe.loop.group_size,
        prompt_length=lengths.longest,
        completion_length=recipe.sampling.max_new_tokens,
        micro_batch=settings.micro_batch_size,
        updates=settings.updates_per_batch,
        scores_old=settings.updates_per_batch > 1
        or settings.filters.has_filters
        or (needs_vocabulary and objective.needs_baseline),
        reference=uses_reference,
        whole_vocabulary=needs_vocabulary and not keeps_top,
        stores_top_k=keeps_top,
        split_gradient_fraction=diagnostic_fraction(recipe.loop.max_steps) if has_kl_term else 0,
        checkpointing=recipe.model.gradient_checkpointing,
        couples_row_tokens=not objective.token_by_token,
    )


NUM_MEASURED = 3  # tokens, and micro-batches, from which all later ones are extrapolated


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Memory of a run by phase."""

    phases: tuple[Phase, ...]
    lengths: PromptLengths
    num_parameters: int
    num_trainable: int
    shape: DecoderShape
    sizes: StepSizes
    left_out: str | None = None
    """Why only weights, gradients and optimizer moments are counted; None if everything is."""


def forecast_memory(recipe: Recipe, *, num_gpus: int = 0) -> Forecast:
    """Run the phases of a recipe on meta tensors: on the CPU, or on GPUs that shard the learner."""
    with _fast_garbage_collection():
        return _build_forecast(recipe, num_gpus)


@contextmanager
def _fast_garbage_collection() -> Iterator[None]:
    """Make garbage collection fast by freezing the objects that exist already."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _build_forecast(recipe: Recipe, num_gpus: int) -> Forecast:
    bare = build_meta_policy(
        recipe.model,
        temperature=recipe.sampling.temperature,
        tied_to=_reference_model(recipe),
        moves=recipe.reference.moves,
        num_gpus=num_gpus,
    )
    lengths = find_prompt_lengths(recipe, window=bare.policy.context_window)
    left_out = None
    try:
        phases = _measure_phases(recipe, lengths, bare, num_gpus)
    except RuntimeError as error:
        # routing to experts, for example, depends on values
        left_out = f"{type(bare.policy.lm).__name__} needs values ({str(error).partition('.')[0]})"
        phases = [_weights_only_phase(bare, num_ranks=max(1, num_gpus))]
    return Forecast(
        phases=memory.peak_by_phase(phases),
        lengths=lengths,
        num_parameters=bare.num_parameters,
        num_trainable=bare.num_trainable,
        shape=decoder_shape(
            bare.policy.lm,
            num_parameters=bare.num_parameters,
            num_trainable=bare.num_trainable,
        ),
        sizes=step_sizes(
            recipe,
            lengths,
            uses_reference=bool(_reference_model(recipe)),
            has_kl_term=_kl_coef(recipe) > 0,
        ),
        left_out=left_out,
    )


def _weights_only_phase(bare: MetaPolicy, *, num_ranks: int) -> Phase:
    """Return the bytes of weights, gradients and AdamW moments of a rank in an update."""
    update_bytes = memory.state_bytes(
        num_parameters=0, num_trained=-(-bare.num_trainable // num_ranks), num_reference=0
    )
    counted = {kind: bare.meter.live[kind] for kind in (memory.WEIGHTS, memory.REFERENCE)}
    return Phase(name=memory.UPDATING, num_bytes=update_bytes | counted)


def _reference_model(recipe: Recipe) -> str | bool:
    """Return the reference: False for none, True for the start policy, or the path of a model."""
    kl = recipe.kl
    if kl is None or not needs_reference(kl, LoopState(kl=KLCoefState(coef=kl.coef))):
        return False
    return recipe.reference.path or True


def _measure_phases(
    recipe: Recipe, lengths: PromptLengths, bare: MetaPolicy, num_gpus: int
) -> list[Phase]:
    """Return the phases of the steps that use the most memory."""
    objective, settings = learner_settings(recipe)
    # the sets of kept tokens depend on values, which meta tensors do not have
    unfiltered = replace(settings, filters=NO_FILTERS)
    if num_gpus > 1:
        with sharded_learner(
            bare, num_ranks=num_gpus, objective=objective, settings=unfiltered
        ) as rank:
            return list(_measure_steps(recipe, lengths, bare, rank, samples=False))
    learner = LocalLearner(bare.policy, bare.reference, objective=objective, settings=unfiltered)
    # an engine has its own weights and cache
    samples = not (num_gpus and recipe.sampler.type == "vllm")
    return list(_measure_steps(recipe, lengths, bare, learner, samples=samples))


def _measure_steps(
    recipe: Recipe,
    lengths: PromptLengths,
    bare: MetaPolicy,
    learner: LocalLearner,
    *,
    samples: bool,
) -> Iterator[Phase]:
    """Yield the phases of a learner, and of the sampler that uses its weights."""
    steps = [1] if recipe.loop.max_steps == 1 else [1, 2]
    if recipe.loop.max_steps > EARLY_INTERVAL:
        # the second diagnostic step holds all that the first does, and the optimizer moments
        _fill_optimizer_moments(bare, learner)
        steps = [EARLY_INTERVAL + 1]
    params, max_new_tokens = sampling_params(recipe), recipe.sampling.max_new_tokens
    rows = _BatchShape(prompts=recipe.loop.prompts_per_step, group=recipe.loop.group_size)
    for step in steps:
        if samples:
            yield from _measure_sampling(bare, lengths, rows, params, max_new_tokens)
        yield from _measure_learning(recipe, lengths, bare, learner, step)
    if samples and lengths.num_held_out:
        held_out = _BatchShape(prompts=min(EVAL_BATCH_SIZE, lengths.num_held_out), group=1)
        for phase in _measure_sampling(bare, lengths, held_out, GREEDY, max_new_tokens):
            yield Phase(name=memory.EVALUATING, num_bytes=phase.num_bytes)


def _fill_optimizer_moments(bare: MetaPolicy, learner: LocalLearner) -> None:
    """Make one update, so that the optimizer moments exist."""
    for parameter in bare.policy.lm.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    with bare.meter.count_as(memory.OPTIMISER):
        learner.commit()


@dataclass(frozen=True, slots=True, kw_only=True)
class _BatchShape:
    prompts: int
    group: int


@torch.no_grad()
def _measure_sampling(
    bare: MetaPolicy,
    lengths: PromptLengths,
    rows: _BatchShape,
    params: SamplingParams,
    max_new_tokens: int,
) -> list[Phase]:
    """Return the memory of prefill and of sampling the last token."""
    meter, lm = bare.meter, bare.policy.lm
    uniforms = np.zeros(min(max_new_tokens, NUM_MEASURED))
    first = lengths.shortest if rows.prompts > 1 else lengths.longest
    streams = [
        # all different, so that prefill shares none; the last is the longest
        Stream(context=np.full(lengths.longest if number else first, number), uniforms=uniforms)
        for number in range(rows.prompts)
        for _ in range(rows.group)
    ]
    usages: list[Counter[str]] = []
    lm.eval()
    meter.reset_peak()
    before = meter.live[memory.ACTIVATIONS]
    # the cache grows by one token at a time, which measures bytes per token
    for _ in decode(
        bare.policy.scorer, streams, params=params, eos_ids=frozenset(), pad_id=0, block=1
    ):
        peak = meter.peak
        meter.reset_peak()
        cache_bytes = meter.live[memory.ACTIVATIONS] - before if usages else 0
        usages.append(peak + Counter({memory.CACHE: cache_bytes}))
        usages[-1][memory.ACTIVATIONS] -= cache_bytes
    lm.train()
    reading = Phase(name=memory.READING, num_bytes=_without_gradients(usages[0]))
    if len(usages) == 1:
        return [reading]
    last = extrapolate_bytes(usages[1], usages[2], max_new_tokens) if len(usages) > 2 else usages[1]
    return [reading, Phase(name=memory.SAMPLING, num_bytes=_without_gradients(last))]


def _without_gradients(num_bytes: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes with no gradients: tensors of a weight's shape count as activations."""
    result = dict(num_bytes)
    shaped = result.pop(memory.GRADIENTS, 0)
    return result | {memory.ACTIVATIONS: result.get(memory.ACTIVATIONS, 0) + shaped}


def _measure_learning(
    recipe: Recipe, lengths: PromptLengths, bare: MetaPolicy, learner: LocalLearner, step: int
) -> Iterator[Phase]:
    """Yield the memory of scoring, the update and the commit."""
    # rows of one micro-batch on every rank
    size = recipe.learner.micro_batch_size * learner.group.size
    num_rows = recipe.loop.prompts_per_step * recipe.loop.group_size
    num_micro_batches = -(-num_rows // size)

    def measure_scoring(num_batches: int) -> tuple[ScoredBatch, _MemoryUse]:
        record = largest_record(recipe, lengths, min(num_rows, num_batches * size), step)
        bare.meter.reset_peak()
        scored = learner.score(record, needs_reference=bare.reference is not None)
        return scored, _MemoryUse(peak=bare.meter.peak, live=bare.meter.live.copy())

    _, third = measure_scoring(NUM_MEASURED)
    del _  # free the tensors of three micro-batches before measuring two
    scored, second = measure_scoring(2)
    scoring_peak = extrapolate_bytes(second.peak, third.peak, max(2, num_micro_batches))
    yield Phase(name=memory.SCORING, num_bytes=_without_gradients(scoring_peak))
    # every further micro-batch keeps a sample of the reference's hidden states
    further = Counter(extrapolate_bytes(second.live, third.live, max(2, num_micro_batches)))
    further.subtract(second.live)
    for _ in range(min(2, recipe.learner.updates_per_batch)):
        bare.meter.reset_peak()
        learner.prepare(scored, LossScales(kl_coef=_kl_coef(recipe)))
        yield Phase(name=memory.UPDATING, num_bytes=dict(bare.meter.peak + further))
        bare.meter.reset_peak()
        with bare.meter.count_as(memory.OPTIMISER):
            learner.commit()
        yield Phase(name=memory.COMMITTING, num_bytes=dict(bare.meter.peak))


@dataclass(frozen=True, slots=True, kw_only=True)
class _MemoryUse:
    peak: Counter[str]
    live: Counter[str]


def _kl_coef(recipe: Recipe) -> float:
    """Return a KL coefficient of the run: nonzero if a controller changes it."""
    if recipe.kl is None or (recipe.kl.coef == 0 and recipe.kl.controller == "fixed"):
        return 0.0
    return recipe.kl.coef or 1.0


def largest_record(recipe: Recipe, lengths: PromptLengths, num_rows: int, step: int) -> StepRecord:
    """Return a record of completions of the largest size, with rewards."""
    group = recipe.loop.group_size
    num = recipe.sampling.max_new_tokens
    segment = Segment(
        token_ids=np.zeros(num, dtype=np.int64),
        emitted_by=EmittedBy.POLICY,
        logp_sampler=np.zeros(num, dtype=np.float32),
        weight_version=0,
    )
    rollouts = [
        Rollout(
            prompt=Prompt(
                index=row // group,
                text="",
                token_ids=np.zeros(lengths.longest, dtype=np.int64),
                columns={},
            ),
            sample=row % group,
            segments=(segment,),
            finish_reason="stop",
            text="",
        )
        for row in range(num_rows)
    ]
    zeros = np.zeros(num_rows)
    return replace(flatten_rollouts(rollouts, step=step), reward=zeros, advantage=zeros)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Bytes and FLOPs of one step in which every completion has the maximum length."""

    num_tokens: int
    """Tokens of all completions."""
    cache_per_token: int
    """Bytes of the KV cache in the sampler."""
    logits_avoided: int
    """Bytes that fp32 logits of all tokens would take; they are never materialized at once."""
    synced: int
    """Bytes of weights sent to the sampler; 0 where it samples from the learner's own weights."""
    stored: int
    """Bytes of records on disk."""
    sent: int
    """Bytes of the rows sent to each other rank of the learner; 0 with one rank."""
    work: StepFlops | None
    """None for a mixture of experts, which uses only some of its weights for a token."""


def step_cost(recipe: "Recipe", forecast: "Forecast") -> StepCost:
    """Return the cost of a step other than memory."""
    shape, sizes = forecast.shape, forecast.sizes
    is_vllm, is_sharded = recipe.sampler.type == "vllm", recipe.learner.shards > 1
    has_copy = is_vllm or recipe.cluster is not None
    bytes_per_value = BF16_BYTES if is_vllm and recipe.model.dtype == "bf16" else FP32_BYTES
    has_adapter = shape.num_trained < shape.num_parameters
    sent_values = FP32_BYTES if has_adapter else bytes_per_value
    return StepCost(
        num_tokens=sizes.num_completion_tokens,
        cache_per_token=bytes_per_value * shape.kv_entries_per_token,
        logits_avoided=FP32_BYTES * shape.vocabulary * sizes.num_completion_tokens,
        synced=sync_bytes(shape, sent_values) if has_copy else 0,
        stored=round(stored_bytes(shape, sizes)) if recipe.output.records_every else 0,
        sent=round(sent_bytes(sizes) / recipe.learner.num_ranks) if is_sharded else 0,
        work=step_flops(shape, sizes) if forecast.left_out is None else None,
    )


def split_accelerators(
    forecast: "Forecast", device: Accelerator, *, num: int
) -> DeviceSplit | None:
    """Return how to split `num` accelerators between samplers and learner."""
    if forecast.left_out is not None:
        return None
    return best_split(forecast.shape, forecast.sizes, device, num=num)
