"""The policy that the KL term ties to: a frozen copy, or the same model with its adapter off."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from klinic.model.layout import Layout
from klinic.model.scorer import RefHidden, TokenScorer
from klinic.model.weights import digest


@dataclass(slots=True, kw_only=True)
class Reference:
    """A frozen policy to score tokens with; it counts how often it was asked."""

    scorer: TokenScorer
    kind: Literal["copy", "adapter_off"]
    source: str
    """Where its weights can be found again."""
    digest: str
    num_forwards: int = 0

    @torch.no_grad()
    def hidden(self, layout: Layout) -> RefHidden:
        """Return the hidden states of the completion tokens, and the way to logits."""
        self.num_forwards += 1
        with self._in_force():
            return RefHidden(hidden=self.scorer.hidden(layout), logits=self._logits)

    @torch.no_grad()
    def logp(self, hidden: RefHidden, target_ids: Tensor) -> Tensor:
        """Return the log-probs of the tokens."""
        with self._in_force():
            return self.scorer.score(hidden.hidden, target_ids).logp

    @torch.no_grad()
    def _logits(self, hidden: Tensor) -> Tensor:
        with self._in_force():
            logits: Tensor = self.scorer.head(hidden)
            return logits

    @contextmanager
    def _in_force(self) -> Iterator[None]:
        if self.kind == "copy":
            yield
            return
        lm: Any = self.scorer.lm
        with lm.disable_adapter():
            yield


def frozen_copy(policy: TokenScorer, *, source: str) -> Reference:
    """Return the policy as it is now, to stay so."""
    scorer = copy.deepcopy(policy)
    return frozen(scorer, source=source)


def frozen(scorer: TokenScorer, *, source: str) -> Reference:
    """Return a model of its own as the reference."""
    scorer.requires_grad_(False)
    return Reference(
        scorer=scorer, kind="copy", source=source, digest=digest(scorer.lm.state_dict())
    )


def adapter_off(policy: TokenScorer, *, source: str) -> Reference:
    """Return the policy's own base weights: no copy, right only for an adapter that starts at 0."""
    return Reference(
        scorer=policy, kind="adapter_off", source=source, digest=base_digest(policy.lm)
    )


def base_digest(lm: Any) -> str:
    """Return a hash of the weights under an adapter."""
    return digest({name: p for name, p in lm.state_dict().items() if "lora_" not in name})
