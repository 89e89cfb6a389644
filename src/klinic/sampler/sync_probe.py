"""Compares the engine's log-probs with the policy's after every weight sync.

Digests prove that weights arrived; only log-probs prove that they are in use. The engine continues
two long prompts and the policy scores the sampled tokens. One prompt is always the same, so a stale
prefix cache would serve it; the other is new each time, so no cache can. Where engine and policy
differ, the policy also scores the tokens under the usual mistakes (no temperature, adapter off).

The comparison covers the most likely tokens at each position, not only the sampled one: a confident
policy assigns its samples the same log-prob before and after an update.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from klinic.model.adapters import is_adapted
from klinic.model.layout import lay_out
from klinic.model.loading import Policy
from klinic.model.scorer import TokenScorer
from klinic.sampler.drawing import Drawing
from klinic.sampler.vllm_engine import Asked, Told

PROMPT = 301  # tokens; prefix-cache blocks have up to 128, so a short prompt fills none
NEW = 16  # tokens to generate
TOP = 4  # most likely tokens to compare
REPEATED = 0  # seed of the prompt that is always the same

Answer = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    prompt: np.ndarray
    token_ids: np.ndarray
    outcomes: list[dict[int, float]]
    """Log-probs that the engine reported at each token."""


class SyncProbe:
    """The two probe prompts, sent after every weight sync."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        window = policy.context_window or PROMPT + NEW
        self._length = min(PROMPT, window - NEW)
        self._number = REPEATED

    def asked(self) -> list[Asked]:
        """Return the requests of this sync: the repeated prompt and a fresh one."""
        self._number += 1
        return [
            Asked(
                token_ids=self._prompt(seed).tolist(),
                seed=self._number,
                max_tokens=NEW,
                how=Drawing(temperature=self._policy.scorer.temperature),
                eos_ids=(),
                top=TOP,
            )
            for seed in (REPEATED, self._number)
        ]

    def judged(self, asked: Sequence[Asked], told: Sequence[Told]) -> Answer:
        """Return the mean absolute log-prob gap in nats per token, for both prompts."""
        repeated, fresh = (
            _Drawn(
                prompt=np.array(one.token_ids),
                token_ids=np.array(answer.token_ids),
                outcomes=answer.outcomes,
            )
            for one, answer in zip(asked, told, strict=True)
        )
        scorer = self._policy.scorer
        answer: Answer = {
            "repeated": self._gap(repeated, scorer),
            "fresh": self._gap(fresh, scorer),
            "cached_tokens": float(told[0].cached_tokens),
        }
        if scorer.temperature != 1:
            plain = TokenScorer(scorer.lm, temperature=1.0, autocast=scorer.autocast)
            answer["raw"] = self._gap(fresh, plain)
        if is_adapted(scorer.lm):
            answer["adapter_off"] = self._gap(fresh, scorer, within=scorer.lm.disable_adapter)
        return answer

    def _prompt(self, seed: int) -> np.ndarray:
        known = min(len(self._policy.tokenizer), self._policy.vocabulary_size)
        usable = np.setdiff1d(np.arange(known), self._policy.eos_ids)
        return np.random.default_rng(seed).choice(usable, self._length)

    @torch.no_grad()
    def _gap(
        self, drawn: _Drawn, scorer: TokenScorer, within: Callable[[], Any] = nullcontext
    ) -> float:
        pad, device = self._policy.pad_id, scorer.device
        layout = lay_out([drawn.prompt], [drawn.token_ids], pad_id=pad, device=device)
        with within():
            logp = scorer.log_softmax(scorer.logits(scorer.hidden(layout))).double().cpu().numpy()
        told = [(t, i, p) for t, one in enumerate(drawn.outcomes) for i, p in one.items()]
        places, ids, theirs = (np.array(column) for column in zip(*told, strict=True))
        return float(np.abs(theirs - logp[places, ids]).mean())
