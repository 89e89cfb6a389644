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
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from klinic.errors import PolicyError
from klinic.model.adapters import (
    FROZEN_ADAPTER,
    add_frozen_copy,
    base_digest,
    base_weights,
    frozen_state_dict,
    has_adapter,
    policy_digest,
    starts_at_zero,
    use_frozen_adapter,
)
from klinic.model.equivalence import probe_layout
from klinic.model.layout import Layout, TokenTargets
from klinic.model.scorer import RefHidden, TokenScorer
from klinic.model.start_digests import StartDigests
from klinic.model.weights import digest, sampled_digest

ReferenceKind = Literal["copy", "adapter_off", "adapter_frozen"]


class ReferenceIdentity(TypedDict):
    """Which weights the start reference has, as run.json and checkpoints hold it."""

    kind: ReferenceKind | Literal["none"]
    source: str | None
    digest: str | None


@dataclass(slots=True, kw_only=True)
class Reference:
    """A frozen policy that scores tokens; it counts its forward passes."""

    scorer: TokenScorer
    kind: ReferenceKind
    source: str
    """Where its weights come from: a folder or a hub id."""
    digest: str
    adapter: str = FROZEN_ADAPTER
    """Name of the active frozen copy, for `adapter_frozen`."""
    step: int = 0
    """The step after which it last changed; 0 is the start."""
    num_forwards: int = 0

    @torch.no_grad()
    def hidden(self, layout: Layout) -> RefHidden:
        """Return the hidden states of the completion tokens, with the function to logits."""
        self.num_forwards += 1
        with self._active_adapter():
            return RefHidden(hidden=self.scorer.hidden(layout), logits=self._logits_of)

    @torch.no_grad()
    def logp(self, hidden: RefHidden, targets: TokenTargets) -> Tensor:
        """Return the log-probs of the tokens."""
        with self._active_adapter():
            return self.scorer.logp(hidden.hidden, targets)

    @torch.no_grad()
    def _logits_of(self, hidden: Tensor) -> Tensor:
        if self.kind == "copy":
            return self.scorer.logits_of(hidden)
        with self._active_adapter():  # called inside the forward pass of the same model
            logits: Tensor = self.scorer.head(hidden)
            return logits

    @torch.no_grad()
    def current_fingerprint(self) -> str:
        """Return a fingerprint of the current weights; `digest` is the expected identity."""
        lm: Any = self.scorer.lm
        match self.kind:
            case "copy":
                return sampled_digest(dict(lm.named_parameters()))
            case "adapter_off":
                return sampled_digest(base_weights(lm))
            case "adapter_frozen":
                return sampled_digest(frozen_state_dict(lm))

    def _active_adapter(self) -> AbstractContextManager[Any]:
        lm: Any = self.scorer.lm
        match self.kind:
            case "copy":
                return nullcontext()
            case "adapter_off":
                off: AbstractContextManager[Any] = lm.disable_adapter()
                return off
            case "adapter_frozen":
                return use_frozen_adapter(lm, self.adapter)


def reference_at_start(
    policy: TokenScorer, *, source: str, moves: bool = False, digests: StartDigests | None = None
) -> Reference:
    """Return the initial policy as a reference, verified; a moving one gets its own weights.

    `digests` are those of the policy; by default they are computed here.
    """
    digests = StartDigests(policy.lm) if digests is None else digests
    if not has_adapter(policy.lm):
        return make_reference(copy.deepcopy(policy), source=source, weights_digest=digests.policy)
    if starts_at_zero(policy.lm) and not moves:
        reference = make_adapter_off_reference(policy, source=source, weights_digest=digests.base)
    else:
        reference = make_adapter_frozen_reference(
            policy, source=source, weights_digest=digests.policy
        )
    return verify_reference(reference)


def copy_as_reference(policy: TokenScorer, *, source: str) -> Reference:
    """Return a frozen copy of the policy's current weights."""
    scorer = copy.deepcopy(policy)
    return make_reference(scorer, source=source)


def make_reference(
    scorer: TokenScorer, *, source: str, weights_digest: str | None = None
) -> Reference:
    """Return a separate model as the reference; its digest is computed unless it is given."""
    scorer.requires_grad_(False)
    if weights_digest is None:
        weights_digest = digest(scorer.lm.state_dict())
    return Reference(scorer=scorer, kind="copy", source=source, digest=weights_digest)


def make_adapter_off_reference(
    policy: TokenScorer, *, source: str, weights_digest: str | None = None
) -> Reference:
    """Return the policy's base as the reference: no copy, exact only for an adapter that is 0."""
    if not starts_at_zero(policy.lm):
        raise PolicyError(
            f"the adapter of {source} does not start at 0, so the model with its adapter disabled "
            "is not the initial policy: the KL would be large before the first step, and pull the "
            "policy back to the base. Leave `reference` out for a frozen copy of the adapter, or "
            "set reference.path to the base to stay close to it."
        )
    base = base_digest(policy.lm) if weights_digest is None else weights_digest
    assert base is not None  # noqa: S101 - it has an adapter
    return Reference(scorer=policy, kind="adapter_off", source=source, digest=base)


def make_adapter_frozen_reference(
    policy: TokenScorer,
    *,
    source: str,
    adapter: str = FROZEN_ADAPTER,
    weights_digest: str | None = None,
) -> Reference:
    """Return the policy with a frozen copy of its current adapter; the base is not copied."""
    before = policy_digest(policy.lm) if weights_digest is None else weights_digest
    add_frozen_copy(policy.lm, adapter)
    return Reference(
        scorer=policy, kind="adapter_frozen", source=source, digest=before, adapter=adapter
    )


def adapter_reference(policy: TokenScorer, *, source: str, digests: StartDigests) -> Reference:
    """Return a model with an adapter as its own reference, verified.

    Its frozen copy is active, if it has one, else the adapter is disabled.
    """
    has_copy = FROZEN_ADAPTER in policy.lm.peft_config
    weights_digest = digests.policy if has_copy else digests.base
    assert weights_digest is not None  # noqa: S101 - it has an adapter
    kind: ReferenceKind = "adapter_frozen" if has_copy else "adapter_off"
    return verify_reference(
        Reference(scorer=policy, kind=kind, source=source, digest=weights_digest)
    )


@torch.no_grad()
def verify_reference(reference: Reference) -> Reference:
    """Refuse a reference that is not bitwise equal to the initial policy."""
    policy = reference.scorer
    layout = probe_layout(policy.lm, policy.device)
    hidden = policy.hidden(layout)
    policy_logp = policy.score(hidden, layout.targets).logp
    reference_logp = reference.logp(reference.hidden(layout), layout.targets)
    reference.num_forwards = 0
    if not torch.equal(policy_logp, reference_logp):
        difference = float((policy_logp - reference_logp).abs().max())
        raise PolicyError(
            f"the reference ({reference.kind}) of {reference.source} differs from the policy by "
            f"{difference:.1e} before the first step, so the KL "
            "would not measure the policy's change. "
            "Merge the adapter (klinic export --merge) and set model.lora_rank for a new one."
        )
    return reference
