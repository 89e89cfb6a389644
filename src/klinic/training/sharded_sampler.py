"""Samples with a sharded policy: every rank completes a part of the rows.

A forward pass gathers the weights of a layer at a time on all ranks, so a rank whose rows are
finished makes passes until no rank has any rows left.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from klinic.errors import LogitsError
from klinic.learner.fsdp import FsdpLearner, release_gathered
from klinic.learner.protocol import Learner
from klinic.learner.rpc import Rank0Learner
from klinic.model.weights import Weights, rows_of_ranks
from klinic.sampler.decoding import Stream, decode
from klinic.sampler.protocol import LoadResult
from klinic.sampler.random_streams import RandomStream
from klinic.sampler.rollouts import TurnRequest
from klinic.sampler.token_sampling import GREEDY, SamplingParams
from klinic.sampler.transformers import TransformersSampler, eval_mode

COMPLETE = "complete_turns"
"""Name of the call that ranks execute."""


class ShardedSampler(TransformersSampler):
    """The sampler in the process of rank 0, whose rows all ranks complete."""

    def __init__(self, learner: Rank0Learner, **settings: Any) -> None:
        """Take the learner, and what else a `TransformersSampler` needs."""
        super().__init__(learner.policy, **settings)
        self._learner = learner
        self._settings = settings

    def load(self, weights: Weights) -> LoadResult:
        """Record the weight version; the weights are the learner's shards."""
        self._version = weights.version
        return LoadResult(fingerprint=weights.fingerprint)

    def greedy(self) -> "ShardedSampler":
        """Return a sampler of the most likely completion of each prompt, on the same weights."""
        return ShardedSampler(
            self._learner, **{**self._settings, "params": GREEDY, "group_size": 1}
        )

    def _complete_turns(self, turns: Sequence[TurnRequest]) -> Iterator[tuple[int, Stream]]:
        arguments = {
            "turns": [(turn.context.tolist(), asdict(turn.numbers)) for turn in turns],
            "params": asdict(self._params),
        }
        complete = partial(complete_turns, turns=turns, params=self._params)
        yield from enumerate(self._learner.run_on_ranks(COMPLETE, arguments, complete))


def make_sharded_sampler(learner: Learner, settings: dict[str, Any]) -> ShardedSampler:
    """Return a sampler on the shards of a learner."""
    assert isinstance(learner, Rank0Learner)  # noqa: S101 - the recipe has shards
    return ShardedSampler(learner, **settings)


def complete_rank_turns(
    learner: FsdpLearner,
    *,
    turns: list[tuple[list[int], dict[str, int]]],
    params: dict[str, Any],
) -> None:
    """Take part in completing turns, given as JSON values, on a rank other than 0."""
    parsed = [
        TurnRequest(context=np.array(context), numbers=RandomStream(**numbers))
        for context, numbers in turns
    ]
    complete_turns(learner, turns=parsed, params=SamplingParams(**params))


@torch.no_grad()
def complete_turns(
    learner: FsdpLearner, *, turns: Sequence[TurnRequest], params: SamplingParams
) -> list[Stream]:
    """Return all turns completed; all ranks make this call alike."""
    policy, group = learner.policy, learner.group
    streams = [turn.make_stream() for turn in turns]
    own = streams[rows_of_ranks(len(turns), group.size)[group.rank]]
    pace, is_finite = _Pace(learner), True
    with eval_mode(policy.lm):
        try:
            for _ in own and decode(
                policy.scorer,
                own,
                params=params,
                eos_ids=frozenset(policy.eos_ids),
                pad_id=policy.pad_id,
                before_pass=pace.start_pass,
            ):
                pass
        except LogitsError:
            is_finite = False
        pace.finish()
    release_gathered(policy.scorer)
    return _gather_streams(learner, streams, own, is_finite=is_finite)


class _Pace:
    """Makes all ranks run an equal number of forward passes."""

    def __init__(self, learner: FsdpLearner) -> None:
        self._learner = learner
        pad = learner.policy.pad_id
        self._any_token = torch.tensor([[pad]], device=learner.scorer.device)

    def start_pass(self) -> None:
        """Wait for the other ranks."""
        self._count_active(1)

    def finish(self) -> None:
        """Run passes until no rank needs any."""
        while self._count_active(0):
            self._learner.scorer.decode(input_ids=self._any_token, use_cache=False)

    def _count_active(self, active: int) -> int:
        return int(self._learner.group.all_reduce_sum(torch.tensor(active)))


def _gather_streams(
    learner: FsdpLearner, streams: list[Stream], own: list[Stream], *, is_finite: bool
) -> list[Stream]:
    """Fill the streams of the other ranks, and return all."""
    sum_over_ranks = learner.group.all_reduce_sum
    is_own = {id(stream) for stream in own}
    facts = torch.zeros(len(streams) + 1, 2, dtype=torch.int64)
    facts[-1, 0] = not is_finite
    for row, stream in enumerate(streams):
        if id(stream) in is_own:
            stopped = stream.finish_reason == "stop"
            facts[row] = torch.tensor([len(stream.token_ids), stopped])
    facts = sum_over_ranks(facts)
    if facts[-1, 0]:
        raise LogitsError(
            "the policy's logits are not finite: an update made some of its weights NaN or "
            "infinite. Lower learner.learning_rate and resume from an earlier checkpoint."
        )
    lengths = facts[:-1, 0].tolist()

    def gather(values: list[Sequence[float]], dtype: torch.dtype) -> tuple[Tensor, ...]:
        rows = [
            torch.tensor(row if id(stream) in is_own else [0] * length, dtype=dtype)
            for row, stream, length in zip(values, streams, lengths, strict=True)
        ]
        return torch.split(sum_over_ranks(torch.cat(rows)), lengths)

    token_ids = gather([stream.token_ids for stream in streams], torch.int64)
    logp = gather([stream.logp for stream in streams], torch.float64)
    for row, stream in enumerate(streams):
        stream.token_ids, stream.logp = token_ids[row].tolist(), logp[row].tolist()
        stream.finish_reason = "stop" if facts[row, 1] else "length"
    return streams
