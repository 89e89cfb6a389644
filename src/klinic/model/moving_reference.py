"""A reference that follows the policy by an exponential moving average or by resets.

    reference = keep x reference + (1 - keep) x policy        in fp32, over the trained tensors

`keep` near 1 after every step is an exponential moving average; `keep` 0 is a reset, after which
policy and reference are bitwise equal. With an adapter, its frozen copy moves matrix by matrix: the
average of two adapters is not the average of their products.

The initial policy is kept as well: the KL to a reference that follows the policy does not measure
how far the policy has moved since the start.
"""

from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.func import functional_call

from klinic.errors import CheckpointError, PolicyError
from klinic.model.adapters import (
    START_ADAPTER,
    frozen_counterparts,
    frozen_state_dict,
    has_adapter,
    starts_at_zero,
)
from klinic.model.equivalence import MAX_LOGP_DIFFERENCE, probe_layout
from klinic.model.reference import (
    Reference,
    ReferenceKind,
    copy_as_reference,
    make_adapter_frozen_reference,
    make_adapter_off_reference,
)
from klinic.model.scorer import TokenScorer
from klinic.model.weights import digest, sampled_digest, trainable_tensors

MAX_DIGEST_BYTES = 2**28  # bytes of weights that can be hashed after every step in under a second
SAMPLED_PREFIX = "sampled:"


class MovingReferenceIdentity(TypedDict):
    """Which weights a moving reference has, as checkpoints and events hold it."""

    kind: ReferenceKind
    digest: str
    step: int
    jumped: int
    """`MovingReference.last_reset`."""


@dataclass(slots=True, kw_only=True)
class MovingReference(Reference):
    """A reference with its own weights, which move towards or are set to the policy's."""

    start_reference: Reference
    """The initial policy of the run; it never moves."""
    policy_tensors: dict[str, Tensor]
    """The policy's trained tensors, by name."""
    reference_tensors: dict[str, Tensor]
    """The reference's tensors, by the same names."""
    last_reset: int = 0
    """The step after which it left the start or was last reset to the policy."""

    @torch.no_grad()
    def move_towards_policy(self, *, step: int, keep: float) -> None:
        """Move the weights towards the policy; `keep` is the fraction retained."""
        for name, tensor in self.reference_tensors.items():
            if keep:
                tensor.lerp_(self.policy_tensors[name], 1 - keep)  # exact where the two are equal
            else:
                tensor.copy_(self.policy_tensors[name])
        if not keep or not self.step:
            self.last_reset = step
        self.step = step
        self.digest = self._current_digest(whole=not keep or self._num_bytes() <= MAX_DIGEST_BYTES)

    def identity(self) -> MovingReferenceIdentity:
        """Return kind, digest and last update of the reference."""
        return {
            "kind": self.kind,
            "digest": self.digest,
            "step": self.step,
            "jumped": self.last_reset,
        }

    @torch.no_grad()
    def restore_tensors(
        self, tensors: dict[str, Tensor], identity: MovingReferenceIdentity
    ) -> None:
        """Restore saved tensors, and check that they have the saved identity."""
        if tensors.keys() != self.reference_tensors.keys():
            raise CheckpointError(
                f"the saved reference has {len(tensors)} tensors, but the reference of this run "
                f"has {len(self.reference_tensors)} with other names. "
                "Resume with the run's original recipe."
            )
        for name, tensor in self.reference_tensors.items():
            tensor.copy_(tensors[name])
        self.digest = self._current_digest(whole=not identity["digest"].startswith(SAMPLED_PREFIX))
        if self.digest != identity["digest"]:
            raise CheckpointError(
                f"the reference was saved with the digest {identity['digest'][:20]}, but the one "
                f"loaded has {self.digest[:20]}: the KL would use other weights. Resume from an "
                "older checkpoint, or start a new run in another output.dir."
            )
        self.step, self.last_reset = identity["step"], identity["jumped"]

    def _current_digest(self, *, whole: bool) -> str:
        state = self._reference_state()
        return digest(state) if whole else SAMPLED_PREFIX + sampled_digest(state)

    def _num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._reference_state().values())

    def _reference_state(self) -> dict[str, Tensor]:
        lm: Any = self.scorer.lm
        state: dict[str, Tensor] = lm.state_dict() if self.kind == "copy" else frozen_state_dict(lm)
        return state


def make_moving_reference(
    policy: TokenScorer, reference: Reference, *, source: str
) -> MovingReference:
    """Return a reference that can move; `source` is the origin of the initial policy."""
    policy_tensors = trainable_tensors(policy.lm)
    _refuse_mismatched_kind(policy, reference)
    lm: Any = reference.scorer.lm
    is_copy = reference.kind == "copy"
    reference_tensors: dict[str, Tensor] = (
        dict(lm.named_parameters()) if is_copy else frozen_counterparts(lm)
    )
    _refuse_mismatched_tensors(policy_tensors, reference_tensors, reference)
    if is_copy and reference.source != source:
        _refuse_mismatched_model(policy, policy_tensors, reference)
    return MovingReference(
        scorer=reference.scorer,
        kind=reference.kind,
        source=reference.source,
        digest=reference.digest,
        start_reference=_start_reference(policy, source),
        policy_tensors=policy_tensors,
        reference_tensors={name: reference_tensors[name] for name in policy_tensors},
    )


def _start_reference(policy: TokenScorer, source: str) -> Reference:
    """Return the initial policy as a reference, in its cheapest form."""
    if not has_adapter(policy.lm):
        return copy_as_reference(policy, source=source)
    if starts_at_zero(policy.lm):
        return make_adapter_off_reference(policy, source=source)
    return make_adapter_frozen_reference(policy, source=source, adapter=START_ADAPTER)


def _refuse_mismatched_kind(policy: TokenScorer, reference: Reference) -> None:
    """Refuse a reference whose weights have another form than the policy's."""
    if reference.kind == "adapter_off":
        raise PolicyError(
            f"the reference of {reference.source} is the policy with its adapter disabled: it has "
            "no weights of its own to move. Use a frozen copy of the adapter."
        )
    if reference.kind == "copy" and has_adapter(policy.lm):
        raise PolicyError(
            f"reference.path is {reference.source}, a separate model, but the policy trains an "
            "adapter: their weights do not correspond, so the reference cannot move. Leave "
            "reference.path out, or keep the reference fixed."
        )


def _refuse_mismatched_tensors(
    policy_tensors: dict[str, Tensor], reference_tensors: dict[str, Tensor], reference: Reference
) -> None:
    """Refuse tensors that do not match the policy's, or share storage with them."""
    for name, p in policy_tensors.items():
        if name not in reference_tensors or reference_tensors[name].shape != p.shape:
            reference_shape = (
                tuple(reference_tensors[name].shape) if name in reference_tensors else "missing"
            )
            raise PolicyError(
                f"reference.path is {reference.source}: its {name} "
                f"is {reference_shape}, but the policy's is "
                f"{tuple(p.shape)}, so it cannot move to the policy. Use a model of the same "
                "shapes, or keep the reference fixed."
            )
        if reference_tensors[name].untyped_storage().data_ptr() == p.untyped_storage().data_ptr():
            raise PolicyError(
                f"the reference shares {name} with the policy, so it would follow every update and "
                "the KL would stay 0. Copy the weights before training."
            )


@torch.no_grad()
def _refuse_mismatched_model(
    policy: TokenScorer, policy_tensors: dict[str, Tensor], reference: Reference
) -> None:
    """Refuse a model whose log-probs differ from the policy's when it has the policy's weights."""
    layout = probe_layout(policy.lm, policy.device)
    expected = policy(layout).logp
    borrowed = {f"lm.{name}": p for name, p in policy_tensors.items()}
    logp = functional_call(reference.scorer, borrowed, (layout,)).logp
    difference = float((logp - expected).abs().max())
    if not difference <= MAX_LOGP_DIFFERENCE:
        raise PolicyError(
            f"reference.path is {reference.source}: with the policy's weights its log-probs differ "
            f"from the policy's by {difference:.1e} (limit "
            f"{MAX_LOGP_DIFFERENCE:.0e}), so its config differs and it "
            "cannot become the policy. Keep the reference fixed, or use a model of the same "
            "config."
        )
