"""In-process sampler on the learner's own weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from klinic.evidence.rollout import Prompt, Rollout
from klinic.model.loading import Policy
from klinic.model.weights import Weights, fingerprint
from klinic.sampler.decoding import Stream, decode
from klinic.sampler.protocol import LoadResult
from klinic.sampler.random_streams import RandomStream
from klinic.sampler.rollouts import (
    GenerationOutput,
    TurnRequest,
    append_turn,
    context_ids,
    empty_rollouts,
    logp_array,
    remaining_tokens,
    token_array,
)
from klinic.sampler.token_sampling import GREEDY, SamplingParams


class TransformersSampler:
    """Batched generation with a KV cache, on a policy in memory."""

    def __init__(
        self,
        policy: Policy,
        *,
        params: SamplingParams,
        max_new_tokens: int,
        group_size: int,
        seed: int,
    ) -> None:
        self._policy = policy
        self._params = params
        self._max_new_tokens = max_new_tokens
        self._group_size = group_size
        self._seed = seed
        self._version = 0

    def load(self, weights: Weights) -> LoadResult:
        """Record the weight version; the weights are shared, so nothing is copied."""
        self._version = weights.version
        return LoadResult(fingerprint=fingerprint(self._policy.lm))

    def sample(self, prompts: Sequence[Prompt], *, step: int) -> Iterator[list[Rollout]]:
        """Yield the group of each prompt as soon as its last completion is finished."""
        starts = empty_rollouts(prompts, self._group_size)
        done: dict[int, dict[int, Rollout]] = {index: {} for index in range(len(prompts))}
        for number, rollout in self._finish_rollouts(starts, step):
            group = done[number // self._group_size]
            group[rollout.sample] = rollout
            if len(group) == self._group_size:
                yield [group[sample] for sample in range(self._group_size)]

    def extend(self, rollouts: Sequence[Rollout], *, step: int) -> list[Rollout]:
        """Continue each rollout after its last segment."""
        finished = dict(self._finish_rollouts(rollouts, step))
        return [finished[number] for number in range(len(rollouts))]

    def greedy(self) -> "TransformersSampler":
        """Return a sampler of the most likely completion of each prompt, on the same weights."""
        return TransformersSampler(
            self._policy,
            params=GREEDY,
            max_new_tokens=self._max_new_tokens,
            group_size=1,
            seed=self._seed,
        )

    def close(self) -> None:
        """Do nothing: the learner owns the policy."""

    def _finish_rollouts(
        self, rollouts: Sequence[Rollout], step: int
    ) -> Iterator[tuple[int, Rollout]]:
        """Yield each rollout with its index when it is finished."""
        turns = [self._next_turn(rollout, step) for rollout in rollouts]
        full = [i for i, turn in enumerate(turns) if not turn.numbers.num]
        yield from ((i, replace(rollouts[i], finish_reason="length")) for i in full)
        open_ = [i for i in range(len(turns)) if i not in set(full)]
        if not open_:
            return
        for row, stream in self._complete_turns([turns[i] for i in open_]):
            yield open_[row], self._append_turn(rollouts[open_[row]], stream)

    def _complete_turns(self, turns: Sequence[TurnRequest]) -> Iterator[tuple[int, Stream]]:
        """Yield each turn's stream with its index when it is finished."""
        streams = [turn.make_stream() for turn in turns]
        with eval_mode(self._policy.lm):
            for ended in decode(
                self._policy.scorer,
                streams,
                params=self._params,
                eos_ids=frozenset(self._policy.eos_ids),
                pad_id=self._policy.pad_id,
            ):
                yield from ((row, streams[row]) for row in ended)

    def _next_turn(self, rollout: Rollout, step: int) -> TurnRequest:
        numbers = RandomStream(
            seed=self._seed,
            step=step,
            prompt=rollout.prompt.index,
            sample=rollout.sample,
            num=remaining_tokens(rollout, self._policy, self._max_new_tokens),
            skip=rollout.num_policy_tokens,
        )
        return TurnRequest(context=context_ids(rollout), numbers=numbers)

    def _append_turn(self, rollout: Rollout, stream: Stream) -> Rollout:
        turn = GenerationOutput(
            token_ids=token_array(stream.token_ids),
            logp=logp_array(stream.logp),
            finish_reason=stream.finish_reason or "length",
            context=stream.context,
            cached_tokens=0,  # each call has a new cache
        )
        return append_turn(rollout, turn, self._policy, version=self._version)


@contextmanager
def eval_mode(lm: Any) -> Iterator[None]:
    """Switch to eval mode: in training mode, gradient checkpointing disables the cache."""
    training = lm.training
    lm.eval()
    try:
        yield
    finally:
        lm.train(training)
