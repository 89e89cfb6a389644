"""The reference policy of the KL term, in its cheapest exact form.

    kind             meaning                                           cost
    copy             a separate model                                  a second model
    adapter_off      the policy's model with its adapter disabled      nothing
    adapter_frozen   the policy's model with a frozen copy of its      a second adapter
                     adapter active

`adapter_off` equals the initial policy only if the adapter adds exactly 0. An adapter that was
trained before needs `adapter_frozen`. A reference that moves (`moving_reference.py`) needs its own
weights: never `adapter_off`.
"""

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from klinic.errors import PolicyError
from klinic.model.adapters import (
    FROZEN,
    base_digest,
    base_weights,
    freeze_beside,
    frozen_in_force,
    frozen_state,
    is_adapted,
    policy_digest,
    starts_at_zero,
)
from klinic.model.layout import Layout
from klinic.model.probe import probe_layout
from klinic.model.scorer import RefHidden, TokenScorer
from klinic.model.weights import digest, sampled_digest

Kind = Literal["copy", "adapter_off", "adapter_frozen"]


@dataclass(slots=True, kw_only=True)
class Reference:
    """A frozen policy that scores tokens; it counts its forward passes."""

    scorer: TokenScorer
    kind: Kind
    source: str
    """Where its weights come from: a folder or a hub id."""
    digest: str
    adapter: str = FROZEN
    """Name of the active frozen copy, for `adapter_frozen`."""
    step: int = 0
    """The step after which it last changed; 0 is the start."""
    num_forwards: int = 0

    @torch.no_grad()
    def hidden(self, layout: Layout) -> RefHidden:
        """Return the hidden states of the completion tokens, with the function to logits."""
        self.num_forwards += 1
        with self._in_force():
            return RefHidden(hidden=self.scorer.hidden(layout), logits=self._logits)

    @torch.no_grad()
    def logp(self, hidden: RefHidden, target_ids: Tensor) -> Tensor:
        """Return the log-probs of the tokens."""
        with self._in_force():
            return self.scorer.logp(hidden.hidden, target_ids)

    @torch.no_grad()
    def _logits(self, hidden: Tensor) -> Tensor:
        if self.kind == "copy":
            return self.scorer.logits(hidden)
        with self._in_force():  # called inside the forward pass of the same model
            logits: Tensor = self.scorer.head(hidden)
            return logits

    @torch.no_grad()
    def now(self) -> str:
        """Return a fingerprint of the current weights; `digest` is the expected identity."""
        lm: Any = self.scorer.lm
        match self.kind:
            case "copy":
                return sampled_digest(dict(lm.named_parameters()))
            case "adapter_off":
                return sampled_digest(base_weights(lm))
            case "adapter_frozen":
                return sampled_digest(frozen_state(lm))

    def _in_force(self) -> AbstractContextManager[Any]:
        lm: Any = self.scorer.lm
        match self.kind:
            case "copy":
                return nullcontext()
            case "adapter_off":
                off: AbstractContextManager[Any] = lm.disable_adapter()
                return off
            case "adapter_frozen":
                return frozen_in_force(lm, self.adapter)


def as_it_starts(policy: TokenScorer, *, source: str, moves: bool = False) -> Reference:
    """Return the initial policy as a reference, verified; a moving one gets its own weights."""
    if not is_adapted(policy.lm):
        return frozen_copy(policy, source=source)
    if starts_at_zero(policy.lm) and not moves:
        return _proven(adapter_off(policy, source=source))
    return _proven(adapter_frozen(policy, source=source))


def frozen_copy(policy: TokenScorer, *, source: str) -> Reference:
    """Return a frozen copy of the policy's current weights."""
    scorer = copy.deepcopy(policy)
    return frozen(scorer, source=source)


def frozen(scorer: TokenScorer, *, source: str) -> Reference:
    """Return a separate model as the reference."""
    scorer.requires_grad_(False)
    return Reference(
        scorer=scorer, kind="copy", source=source, digest=digest(scorer.lm.state_dict())
    )


def adapter_off(policy: TokenScorer, *, source: str) -> Reference:
    """Return the policy's base as the reference: no copy, exact only for an adapter that is 0."""
    if not starts_at_zero(policy.lm):
        raise PolicyError(
            f"the adapter of {source} does not start at 0, so the model with its adapter disabled "
            "is not the initial policy: the KL would be large before the first step, and pull the "
            "policy back to the base. Leave `reference` out for a frozen copy of the adapter, or "
            "set reference.path to the base to stay close to it."
        )
    base = base_digest(policy.lm)
    assert base is not None  # noqa: S101 - it has an adapter
    return Reference(scorer=policy, kind="adapter_off", source=source, digest=base)


def adapter_frozen(policy: TokenScorer, *, source: str, adapter: str = FROZEN) -> Reference:
    """Return the policy with a frozen copy of its current adapter; the base is not copied."""
    before = policy_digest(policy.lm)
    freeze_beside(policy.lm, adapter)
    return Reference(
        scorer=policy, kind="adapter_frozen", source=source, digest=before, adapter=adapter
    )


@torch.no_grad()
def _proven(reference: Reference) -> Reference:
    """Refuse a reference that is not bitwise equal to the initial policy."""
    policy = reference.scorer
    layout = probe_layout(policy.lm, policy.device)
    hidden = policy.hidden(layout)
    ours = policy.score(hidden, layout.target_ids).logp
    theirs = reference.logp(reference.hidden(layout), layout.target_ids)
    reference.num_forwards = 0
    if not torch.equal(ours, theirs):
        apart = float((ours - theirs).abs().max())
        raise PolicyError(
            f"the reference ({reference.kind}) of {reference.source} differs from the policy by "
            f"{apart:.1e} before the first step, so the KL would not measure the policy's change. "
            "Merge the adapter (klinic export --merge) and set model.lora_rank for a new one."
        )
    return reference
