"""In-process sampler on the learner's own weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from klinic.evidence.rollout import Prompt, Rollout
from klinic.model.loading import Policy
from klinic.model.weights import Weights, fingerprint
from klinic.sampler.decoding import Stream, decode
from klinic.sampler.protocol import LoadResult
from klinic.sampler.random_streams import uniforms
from klinic.sampler.rollouts import (
    GenerationOutput,
    append_turn,
    context_ids,
    empty_rollouts,
    remaining_tokens,
)
from klinic.sampler.token_sampling import SamplingParams


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

    def close(self) -> None:
        """Do nothing: the learner owns the policy."""

    def _finish_rollouts(
        self, rollouts: Sequence[Rollout], step: int
    ) -> Iterator[tuple[int, Rollout]]:
        """Yield each rollout with its index when it is finished."""
        streams = [self._make_stream(rollout, step) for rollout in rollouts]
        full = [i for i, stream in enumerate(streams) if not len(stream.uniforms)]
        yield from ((i, replace(rollouts[i], finish_reason="length")) for i in full)
        open_ = [i for i in range(len(streams)) if i not in set(full)]
        if not open_:
            return
        with self._eval_mode():
            for ended in decode(
                self._policy.scorer,
                [streams[i] for i in open_],
                params=self._params,
                eos_ids=frozenset(self._policy.eos_ids),
                pad_id=self._policy.pad_id,
            ):
                for row in ended:
                    i = open_[row]
                    yield i, self._append_turn(rollouts[i], streams[i])

    def _make_stream(self, rollout: Rollout, step: int) -> Stream:
        numbers = uniforms(
            seed=self._seed,
            step=step,
            prompt=rollout.prompt.index,
            sample=rollout.sample,
            num=remaining_tokens(rollout, self._policy, self._max_new_tokens),
            skip=rollout.num_policy_tokens,
        )
        return Stream(context=context_ids(rollout), uniforms=numbers)

    def _append_turn(self, rollout: Rollout, stream: Stream) -> Rollout:
        turn = GenerationOutput(
            token_ids=stream.token_ids,
            logp=stream.logp,
            finish_reason=stream.finish_reason or "length",
            context=stream.context.tolist(),
            cached_tokens=0,  # each call has a new cache
        )
        return append_turn(rollout, turn, self._policy, version=self._version)

    @contextmanager
    def _eval_mode(self) -> Iterator[None]:
        """Switch to eval mode: in training mode, gradient checkpointing disables the cache."""
        lm = self._policy.lm
        training = lm.training
        lm.eval()
        try:
            yield
        finally:
            lm.train(training)
