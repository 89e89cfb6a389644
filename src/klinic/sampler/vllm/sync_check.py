"""Compares the engine's log-probs with the policy's after every weight sync.

Digests prove that weights arrived; only log-probs prove that they are in use. The engine continues
two long prompts and the policy scores the sampled tokens. One prompt is always the same, so a stale
prefix cache would serve it; the other is new each time, so no cache can. Where engine and policy
differ, the policy also scores the tokens under the usual mistakes (no temperature, adapter off).

The comparison covers the most likely tokens at each position, not only the sampled one: a confident
policy assigns its samples the same log-prob before and after an update.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from klinic.model.adapters import has_adapter
from klinic.model.loading import Policy
from klinic.model.policy_source import WeightSource
from klinic.sampler.rollouts import GenerationOutput, ReportedLogp
from klinic.sampler.token_sampling import SamplingParams
from klinic.sampler.vllm.engine import GenerationRequest

PROMPT_TOKENS = 301  # tokens; prefix-cache blocks have up to 128, so a short prompt fills none
NEW_TOKENS = 16  # tokens to generate
NUM_TOP = 4  # most likely tokens to compare
REPEATED_SEED = 0  # seed of the prompt that is always the same


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProbeSample:
    prompt: np.ndarray
    token_ids: np.ndarray
    reported: ReportedLogp
    """Log-probs that the engine reported at each token."""

    def mean_gap(self, logits: np.ndarray, temperature: float) -> float:
        """Return the mean absolute gap to the log-probs of the policy's logits."""
        logp = torch.from_numpy(logits).double().div(temperature).log_softmax(-1).numpy()
        reported = self.reported
        return float(np.abs(reported.logp - logp[reported.positions, reported.token_ids]).mean())


class SyncProbe:
    """The two probe prompts, sent after every weight sync."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        window = policy.context_window or PROMPT_TOKENS + NEW_TOKENS
        self._length = min(PROMPT_TOKENS, window - NEW_TOKENS)
        self._number = REPEATED_SEED

    def make_requests(self) -> list[GenerationRequest]:
        """Return the requests of this sync: the repeated prompt and a fresh one."""
        self._number += 1
        return [
            GenerationRequest(
                token_ids=self._make_prompt(seed).tolist(),
                seed=self._number,
                max_tokens=NEW_TOKENS,
                params=SamplingParams(temperature=self._policy.scorer.temperature),
                eos_ids=(),
                num_top=NUM_TOP,
            )
            for seed in (REPEATED_SEED, self._number)
        ]

    def measure_gaps(
        self,
        requests: Sequence[GenerationRequest],
        outputs: Sequence[GenerationOutput],
        source: WeightSource,
    ) -> dict[str, float]:
        """Return the mean absolute log-prob gap in nats per token, for both prompts."""
        repeated, fresh = (
            _make_sample(one, answer) for one, answer in zip(requests, outputs, strict=True)
        )
        scorer = self._policy.scorer
        fresh_logits = source.completion_logits(fresh.prompt, fresh.token_ids)
        answer: dict[str, float] = {
            "repeated": repeated.mean_gap(
                source.completion_logits(repeated.prompt, repeated.token_ids), scorer.temperature
            ),
            "fresh": fresh.mean_gap(fresh_logits, scorer.temperature),
            "cached_tokens": float(outputs[0].cached_tokens),
        }
        if scorer.temperature != 1:
            answer["raw"] = fresh.mean_gap(fresh_logits, 1.0)
        if has_adapter(scorer.lm):
            base_logits = source.completion_logits(fresh.prompt, fresh.token_ids, adapter=False)
            answer["adapter_off"] = fresh.mean_gap(base_logits, scorer.temperature)
        return answer

    def _make_prompt(self, seed: int) -> np.ndarray:
        num_ids = min(len(self._policy.tokenizer), self._policy.vocabulary_size)
        usable = np.setdiff1d(np.arange(num_ids), self._policy.eos_ids)
        return np.random.default_rng(seed).choice(usable, self._length)


def _make_sample(request: GenerationRequest, output: GenerationOutput) -> _ProbeSample:
    assert output.top is not None  # noqa: S101 - the request asks for the most likely tokens
    return _ProbeSample(
        prompt=np.array(request.token_ids), token_ids=output.token_ids, reported=output.top
    )
