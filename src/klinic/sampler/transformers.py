"""Sampling in this process, from the very weights that the learner trains."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from klinic.errors import DataError
from klinic.evidence.record import EmittedBy
from klinic.evidence.rollout import Prompt, Rollout, Segment
from klinic.model.loading import Policy
from klinic.model.weights import Weights, fingerprint
from klinic.sampler.decoding import Stream, decode
from klinic.sampler.drawing import Drawing
from klinic.sampler.random_streams import uniforms


class TransformersSampler:
    """Batched generation with a key-value cache over a policy in memory."""

    def __init__(
        self, policy: Policy, *, how: Drawing, max_new_tokens: int, group_size: int, seed: int
    ) -> None:
        self._policy = policy
        self._how = how
        self._max_new_tokens = max_new_tokens
        self._group_size = group_size
        self._seed = seed
        self._version = 0

    def load(self, weights: Weights) -> str:
        """Note which weights these are: they are shared, so there is nothing to move."""
        self._version = weights.version
        return fingerprint(self._policy.lm)

    def sample(self, prompts: Sequence[Prompt], *, step: int) -> Iterator[list[Rollout]]:
        """Yield the group of each prompt as soon as its last member is finished."""
        starts = [
            Rollout(prompt=prompt, sample=sample, segments=(), finish_reason="length", text="")
            for prompt in prompts
            for sample in range(self._group_size)
        ]
        done: dict[int, dict[int, Rollout]] = {place: {} for place in range(len(prompts))}
        for number, rollout in self._finish(starts, step):
            group = done[number // self._group_size]
            group[rollout.sample] = rollout
            if len(group) == self._group_size:
                yield [group[sample] for sample in range(self._group_size)]

    def extend(self, rollouts: Sequence[Rollout], *, step: int) -> list[Rollout]:
        """Let the policy go on behind the segments of each rollout."""
        finished = dict(self._finish(rollouts, step))
        return [finished[number] for number in range(len(rollouts))]

    def close(self) -> None:
        """Do nothing: the policy is the learner's."""

    def _finish(self, rollouts: Sequence[Rollout], step: int) -> Iterator[tuple[int, Rollout]]:
        """Yield each rollout with its number when the policy has ended it."""
        streams = [self._stream(rollout, step) for rollout in rollouts]
        full = [i for i, stream in enumerate(streams) if not len(stream.uniforms)]
        yield from ((i, replace(rollouts[i], finish_reason="length")) for i in full)
        open_ = [i for i in range(len(streams)) if i not in set(full)]
        if not open_:
            return
        with self._generating():
            for ended in decode(
                self._policy.scorer,
                [streams[i] for i in open_],
                how=self._how,
                eos_ids=frozenset(self._policy.eos_ids),
                pad_id=self._policy.pad_id,
            ):
                for place in ended:
                    i = open_[place]
                    yield i, self._with(rollouts[i], streams[i])

    def _stream(self, rollout: Rollout, step: int) -> Stream:
        used = rollout.num_policy_tokens
        numbers = uniforms(
            seed=self._seed,
            step=step,
            prompt=rollout.prompt.index,
            sample=rollout.sample,
            num=self._max_new_tokens - used,
            skip=used,
        )
        context = np.concatenate([rollout.prompt.token_ids, rollout.token_ids])
        window = self._policy.context_window
        if rollout.segments and window is not None:  # answers of tools take room of their own
            numbers = numbers[: window - len(context)]
        self._refuse_overflow(rollout.prompt, len(context) + len(numbers))
        return Stream(context=context, uniforms=numbers)

    def _refuse_overflow(self, prompt: Prompt, longest: int) -> None:
        window = self._policy.context_window
        if window is not None and longest > window:
            raise DataError(
                f"row {prompt.index + 1}: its prompt has {len(prompt.token_ids)} tokens, and with "
                f"completions of sampling.max_new_tokens = {self._max_new_tokens} it does not fit "
                f"into the {window} tokens of {self._policy.name}. Shorten the prompt or the limit."
            )

    def _with(self, rollout: Rollout, stream: Stream) -> Rollout:
        segment = Segment(
            token_ids=np.array(stream.token_ids, dtype=np.int64),
            emitted_by=EmittedBy.POLICY,
            logp_sampler=np.array(stream.logp, dtype=np.float32),
            weight_version=self._version,
        )
        extended = replace(
            rollout,
            segments=(*rollout.segments, segment),
            finish_reason=stream.finish_reason or "length",
            sent=stream.context[: len(stream.context) - len(rollout.token_ids)],
            cached_tokens=0,  # a cache of its own for every call
        )
        extended = replace(extended, text=self._text(extended.token_ids))
        if rollout.prompt.messages is None:
            return extended
        said = {"role": "assistant", "content": self._text(segment.token_ids)}
        return replace(extended, messages=(*rollout.messages, said))

    def _text(self, token_ids: np.ndarray) -> str:
        text: str = self._policy.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)
        return text

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """Leave training mode: with gradient checkpointing it would refuse a cache."""
        lm = self._policy.lm
        training = lm.training
        lm.eval()
        try:
            yield
        finally:
            lm.train(training)
