"""Forecasts the memory of a recipe by running one step on meta tensors.

The run uses the real learner, sampler and autograd. Every prompt has the longest length and every
completion the maximum length. Steps and micro-batches repeat from the second on, so the second and
the third are extrapolated to the last.
"""

import gc
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from klinic.evidence.record import EmittedBy, StepRecord
from klinic.evidence.rollout import Prompt, Rollout, Segment, flatten
from klinic.learner.local import LocalLearner, Scored
from klinic.learner.looks import OFTEN
from klinic.loop.assembly import make_learner
from klinic.loop.evaluate import BATCH, GREEDY
from klinic.loop.lengths import Lengths, find_lengths
from klinic.loop.sizes import step_sizes
from klinic.loop.state import LoopState
from klinic.loop.step import due
from klinic.maths.kl_coef import KLCoefState
from klinic.model import memory
from klinic.model.bare import Bare, bare_policy
from klinic.model.memory import Phase, extended
from klinic.model.shape import Shape, shape_of
from klinic.model.work import StepSizes
from klinic.recipe.recipe import Recipe
from klinic.sampler.decoding import Stream, decode
from klinic.sampler.drawing import Drawing

MEASURED = 3  # tokens, and micro-batches, from which all later ones are extrapolated


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Memory of a run by phase."""

    phases: tuple[Phase, ...]
    lengths: Lengths
    num_parameters: int
    num_trainable: int
    largest_layer: int
    """Bytes of the largest module that a sharded model all-gathers at a time."""
    shape: Shape
    sizes: StepSizes
    left_out: str | None = None
    """Why only weights, gradients and optimizer moments are counted; None if everything is."""


def forecast(recipe: Recipe) -> Forecast:
    """Run the phases of a recipe on meta tensors."""
    with _prompt_collection():
        return _forecast(recipe)


@contextmanager
def _prompt_collection() -> Iterator[None]:
    """Make garbage collection fast by freezing the objects that exist already."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _forecast(recipe: Recipe) -> Forecast:
    bare = bare_policy(
        recipe.model,
        temperature=recipe.sampling.temperature,
        tied=_tied(recipe),
        moves=recipe.reference.moves,
    )
    lengths = find_lengths(recipe, window=bare.policy.context_window)
    learner = make_learner(recipe, bare.policy, bare.reference)
    left_out = None
    try:
        phases = list(_phases(recipe, lengths, bare, learner))
    except RuntimeError as error:
        # routing to experts, for example, depends on values
        left_out = f"{type(bare.policy.lm).__name__} needs values ({str(error).partition('.')[0]})"
        phases = [_weights_alone(bare)]
    return Forecast(
        phases=memory.highest_by_name(phases),
        lengths=lengths,
        num_parameters=bare.num_parameters,
        num_trainable=bare.num_trainable,
        largest_layer=bare.largest_layer,
        shape=shape_of(
            bare.policy.lm,
            num_parameters=bare.num_parameters,
            num_trainable=bare.num_trainable,
        ),
        sizes=step_sizes(recipe, lengths, tied=bool(_tied(recipe)), trained=_kl_coef(recipe) > 0),
        left_out=left_out,
    )


def _weights_alone(bare: Bare) -> Phase:
    """Return the bytes of weights, gradients and AdamW moments in an update."""
    held = memory.state_bytes(
        num_parameters=bare.num_parameters, num_trained=bare.num_trainable, num_reference=0
    )
    counted = {kind: bare.meter.live[kind] for kind in (memory.WEIGHTS, memory.REFERENCE)}
    return Phase(name=memory.UPDATING, num_bytes=held | counted)


def _tied(recipe: Recipe) -> str | bool:
    """Return the reference: False for none, True for the start policy, or the path of a model."""
    kl = recipe.kl
    if kl is None or not due(kl, LoopState(kl=KLCoefState(coef=kl.coef))):
        return False
    return recipe.reference.path or True


def _phases(recipe: Recipe, lengths: Lengths, bare: Bare, learner: LocalLearner) -> Iterator[Phase]:
    """Yield the phases of the steps that use the most memory."""
    steps = [1] if recipe.loop.max_steps == 1 else [1, 2]
    if recipe.loop.max_steps > OFTEN:
        # the second diagnostic step holds all that the first does, and the optimizer moments
        _make_moments(bare, learner)
        steps = [OFTEN + 1]
    s = recipe.sampling
    how = Drawing(temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, min_p=s.min_p)
    rows = _Rows(prompts=recipe.loop.prompts_per_step, group=recipe.loop.group_size)
    for step in steps:
        yield from _sample(bare, lengths, rows, how, s.max_new_tokens)
        yield from _learn(recipe, lengths, bare, learner, step)
    if lengths.num_held_out:
        held_out = _Rows(prompts=min(BATCH, lengths.num_held_out), group=1)
        for phase in _sample(bare, lengths, held_out, GREEDY, s.max_new_tokens):
            yield Phase(name=memory.EVALUATING, num_bytes=phase.num_bytes)


def _make_moments(bare: Bare, learner: LocalLearner) -> None:
    """Make one update, so that the optimizer moments exist."""
    for parameter in bare.policy.lm.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    with bare.meter.label(memory.OPTIMISER):
        learner.commit()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    prompts: int
    group: int


@torch.no_grad()
def _sample(
    bare: Bare, lengths: Lengths, rows: _Rows, how: Drawing, max_new_tokens: int
) -> list[Phase]:
    """Return the memory of prefill and of sampling the last token."""
    meter, lm = bare.meter, bare.policy.lm
    numbers = np.zeros(min(max_new_tokens, MEASURED))
    first = lengths.shortest if rows.prompts > 1 else lengths.longest
    streams = [
        # all different, so that prefill shares none; the last is the longest
        Stream(context=np.full(lengths.longest if number else first, number), uniforms=numbers)
        for number in range(rows.prompts)
        for _ in range(rows.group)
    ]
    found: list[Counter[str]] = []
    lm.eval()
    meter.begin()
    before = meter.live[memory.ACTIVATIONS]
    # the cache grows by one token at a time, which measures bytes per token
    for _ in decode(bare.policy.scorer, streams, how=how, eos_ids=frozenset(), pad_id=0, block=1):
        held = meter.peak
        meter.begin()
        stays = meter.live[memory.ACTIVATIONS] - before if found else 0
        found.append(held + Counter({memory.CACHE: stays}))
        found[-1][memory.ACTIVATIONS] -= stays
    lm.train()
    reading = Phase(name=memory.READING, num_bytes=_forward_only(found[0]))
    if len(found) == 1:
        return [reading]
    last = extended(found[1], found[2], max_new_tokens) if len(found) > 2 else found[1]
    return [reading, Phase(name=memory.SAMPLING, num_bytes=_forward_only(last))]


def _forward_only(held: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes with no gradients: tensors of a weight's shape count as activations."""
    found = dict(held)
    shaped = found.pop(memory.GRADIENTS, 0)
    return found | {memory.ACTIVATIONS: found.get(memory.ACTIVATIONS, 0) + shaped}


def _learn(
    recipe: Recipe, lengths: Lengths, bare: Bare, learner: LocalLearner, step: int
) -> Iterator[Phase]:
    """Yield the memory of scoring, the update and the commit."""
    size = recipe.learner.micro_batch_size
    num_rows = recipe.loop.prompts_per_step * recipe.loop.group_size
    num = -(-num_rows // size)

    def score(num_batches: int) -> tuple[Scored, _Held]:
        record = _record(recipe, lengths, min(num_rows, num_batches * size), step)
        bare.meter.begin()
        scored = learner.score(record, needs_reference=bare.reference is not None)
        return scored, _Held(peak=bare.meter.peak, live=bare.meter.live.copy())

    _, third = score(MEASURED)
    del _  # free the tensors of three micro-batches before measuring two
    scored, second = score(2)
    held = extended(second.peak, third.peak, max(2, num))
    yield Phase(name=memory.SCORING, num_bytes=_forward_only(held))
    # every further micro-batch keeps a sample of the reference's hidden states
    further = Counter(extended(second.live, third.live, max(2, num)))
    further.subtract(second.live)
    for _ in range(min(2, recipe.learner.updates_per_batch)):
        bare.meter.begin()
        learner.prepare(scored, kl_coef=_kl_coef(recipe))
        yield Phase(name=memory.UPDATING, num_bytes=dict(bare.meter.peak + further))
        bare.meter.begin()
        with bare.meter.label(memory.OPTIMISER):
            learner.commit()
        yield Phase(name=memory.COMMITTING, num_bytes=dict(bare.meter.peak))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    peak: Counter[str]
    live: Counter[str]


def _kl_coef(recipe: Recipe) -> float:
    """Return a KL coefficient of the run: nonzero if a controller changes it."""
    if recipe.kl is None or (recipe.kl.coef == 0 and recipe.kl.controller == "fixed"):
        return 0.0
    return recipe.kl.coef or 1.0


def _record(recipe: Recipe, lengths: Lengths, num_rows: int, step: int) -> StepRecord:
    """Return a record of completions of the largest size, with rewards."""
    group = recipe.loop.group_size
    num = recipe.sampling.max_new_tokens
    said = Segment(
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
            segments=(said,),
            finish_reason="stop",
            text="",
        )
        for row in range(num_rows)
    ]
    zeros = np.zeros(num_rows)
    return replace(flatten(rollouts, step=step), reward=zeros, advantage=zeros)
