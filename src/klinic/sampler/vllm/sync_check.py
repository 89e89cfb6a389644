"""Compares the engine's log-probs with the policy's after every weight sync.

Digests prove that weights arrived; only log-probs prove that they are in use. The engine continues
two long prompts and the policy scores the sampled tokens. One prompt is always the same, so a stale
prefix cache would serve it; the other is new each time, so no cache can. Where engine and policy
differ, the policy also scores the tokens under the usual mistakes (no temperature, adapter off).

The comparison covers the most likely tokens at each position, not only the sampled one: a confident
policy assigns its samples the same log-prob before and after an update.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from klinic.model.adapters import has_adapter
from klinic.model.layout import pad_rows
from klinic.model.loading import Policy
from klinic.model.scorer import TokenScorer
from klinic.sampler.rollouts import GenerationOutput
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
    outcomes: Sequence[Mapping[int, float]]
    """Log-probs that the engine reported at each token."""


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
        self, requests: Sequence[GenerationRequest], outputs: Sequence[GenerationOutput]
    ) -> dict[str, float]:
        """Return the mean absolute log-prob gap in nats per token, for both prompts."""
        repeated, fresh = (
            _ProbeSample(
                prompt=np.array(one.token_ids),
                token_ids=np.array(answer.token_ids),
                outcomes=answer.outcomes,
            )
            for one, answer in zip(requests, outputs, strict=True)
        )
        scorer = self._policy.scorer
        answer: dict[str, float] = {
            "repeated": self._mean_gap(repeated, scorer),
            "fresh": self._mean_gap(fresh, scorer),
            "cached_tokens": float(outputs[0].cached_tokens),
        }
        if scorer.temperature != 1:
            plain = TokenScorer(scorer.lm, temperature=1.0, autocast=scorer.autocast)
            answer["raw"] = self._mean_gap(fresh, plain)
        if has_adapter(scorer.lm):
            answer["adapter_off"] = self._mean_gap(fresh, scorer, within=scorer.lm.disable_adapter)
        return answer

    def _make_prompt(self, seed: int) -> np.ndarray:
        num_ids = min(len(self._policy.tokenizer), self._policy.vocabulary_size)
        usable = np.setdiff1d(np.arange(num_ids), self._policy.eos_ids)
        return np.random.default_rng(seed).choice(usable, self._length)

    @torch.no_grad()
    def _mean_gap(
        self, sample: _ProbeSample, scorer: TokenScorer, within: Callable[[], Any] = nullcontext
    ) -> float:
        pad, device = self._policy.pad_id, scorer.device
        layout = pad_rows([sample.prompt], [sample.token_ids], pad_id=pad, device=device)
        with within():
            logp = (
                scorer.log_softmax(scorer.logits_of(scorer.hidden(layout))).double().cpu().numpy()
            )
        reported = [(t, i, p) for t, one in enumerate(sample.outcomes) for i, p in one.items()]
        positions, ids, theirs = (np.array(column) for column in zip(*reported, strict=True))
        return float(np.abs(theirs - logp[positions, ids]).mean())
