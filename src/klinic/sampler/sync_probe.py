"""After every sync: does the engine say of the same tokens what the policy says of them?

Digests show that weights arrived; only log-probs show that they are in use. So the engine goes on
from two long prompts, and the policy scores what it drew. One prompt is the same every time, so a
prefix cache that outlives its weights answers it; the other is new every time, so none does. Where
the two sides differ, the policy also scores the tokens as the usual mistakes would.

Compared are the likeliest outcomes at each token, not the drawn one alone: a policy that is sure of
itself says the same of what it draws before and after an update.
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

PROMPT = 301  # tokens; blocks of a prefix cache have up to 128, and a short prompt fills none
NEW = 16  # tokens to go on for
TOP = 4  # of the likeliest outcomes
REPEATED = 0  # the seed of the prompt that stays

Answer = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    prompt: np.ndarray
    token_ids: np.ndarray
    outcomes: list[dict[int, float]]
    """Log-probs that the engine tells of, at each token."""


class SyncProbe:
    """Two prompts, asked after every sync."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        window = policy.context_window or PROMPT + NEW
        self._length = min(PROMPT, window - NEW)
        self._number = REPEATED

    def asked(self) -> list[Asked]:
        """Return what to ask this time: the prompt that stays, and a new one."""
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
        """Return how far apart the two sides are, in nats a token, for both prompts."""
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
