"""A reference that follows the policy by an exponential moving average or by resets.

    reference = keep x reference + (1 - keep) x policy        in fp32, over the trained tensors

`keep` near 1 after every step is an exponential moving average; `keep` 0 is a reset, after which
policy and reference are bitwise equal. With an adapter, its frozen copy moves matrix by matrix: the
average of two adapters is not the average of their products.

The initial policy is kept as well: the KL to a reference that follows the policy does not measure
how far the policy has moved since the start.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from klinic.errors import CheckpointError, PolicyError
from klinic.model.adapters import START, frozen_state, frozen_twins, is_adapted, starts_at_zero
from klinic.model.probe import LIMIT, probe_layout
from klinic.model.reference import Reference, adapter_frozen, adapter_off, frozen_copy
from klinic.model.scorer import TokenScorer
from klinic.model.weights import digest, sampled_digest, trained

AFFORDABLE = 2**28  # bytes of weights that can be hashed after every step in under a second
SAMPLED = "sampled:"


@dataclass(slots=True, kw_only=True)
class MovingReference(Reference):
    """A reference with its own weights, which move towards or are set to the policy's."""

    start: Reference
    """The initial policy of the run; it never moves."""
    ours: dict[str, Tensor]
    """The policy's trained tensors, by name."""
    theirs: dict[str, Tensor]
    """The reference's tensors, by the same names."""
    jumped: int = 0
    """The step after which it left the start or was last reset to the policy."""

    @torch.no_grad()
    def move(self, *, step: int, keep: float) -> None:
        """Move the weights towards the policy; `keep` is the fraction retained."""
        for name, mine in self.theirs.items():
            if keep:
                mine.lerp_(self.ours[name], 1 - keep)  # exact where the two are equal
            else:
                mine.copy_(self.ours[name])
        if not keep or not self.step:
            self.jumped = step
        self.step = step
        self.digest = self._name(whole=not keep or self._num_bytes() <= AFFORDABLE)

    def identity(self) -> dict[str, Any]:
        """Return kind, digest and last update of the reference."""
        return {"kind": self.kind, "digest": self.digest, "step": self.step, "jumped": self.jumped}

    @torch.no_grad()
    def go_back(self, tensors: dict[str, Tensor], identity: dict[str, Any]) -> None:
        """Restore saved tensors, and check that they have the saved identity."""
        if tensors.keys() != self.theirs.keys():
            raise CheckpointError(
                f"the saved reference has {len(tensors)} tensors, but the reference of this run "
                f"has {len(self.theirs)} with other names. Resume with the run's original recipe."
            )
        for name, mine in self.theirs.items():
            mine.copy_(tensors[name])
        self.digest = self._name(whole=not identity["digest"].startswith(SAMPLED))
        if self.digest != identity["digest"]:
            raise CheckpointError(
                f"the reference was saved with the digest {identity['digest'][:20]}, but the one "
                f"loaded has {self.digest[:20]}: the KL would use other weights. Resume from an "
                "older checkpoint, or start a new run in another output.dir."
            )
        self.step, self.jumped = identity["step"], identity["jumped"]

    def _name(self, *, whole: bool) -> str:
        state = self._state()
        return digest(state) if whole else SAMPLED + sampled_digest(state)

    def _num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._state().values())

    def _state(self) -> dict[str, Tensor]:
        lm: Any = self.scorer.lm
        state: dict[str, Tensor] = lm.state_dict() if self.kind == "copy" else frozen_state(lm)
        return state


def moving(policy: TokenScorer, reference: Reference, *, source: str) -> MovingReference:
    """Return a reference that can move; `source` is the origin of the initial policy."""
    ours = trained(policy.lm)
    _refuse_other_form(policy, reference)
    lm: Any = reference.scorer.lm
    own = reference.kind == "copy"
    theirs: dict[str, Tensor] = dict(lm.named_parameters()) if own else frozen_twins(lm)
    _refuse_other_tensors(ours, theirs, reference)
    if own and reference.source != source:
        _refuse_other_model(policy, ours, reference)
    return MovingReference(
        scorer=reference.scorer,
        kind=reference.kind,
        source=reference.source,
        digest=reference.digest,
        start=_start(policy, source),
        ours=ours,
        theirs={name: theirs[name] for name in ours},
    )


def _start(policy: TokenScorer, source: str) -> Reference:
    """Return the initial policy as a reference, in its cheapest form."""
    if not is_adapted(policy.lm):
        return frozen_copy(policy, source=source)
    if starts_at_zero(policy.lm):
        return adapter_off(policy, source=source)
    return adapter_frozen(policy, source=source, adapter=START)


def _refuse_other_form(policy: TokenScorer, reference: Reference) -> None:
    """Refuse a reference whose weights have another form than the policy's."""
    if reference.kind == "adapter_off":
        raise PolicyError(
            f"the reference of {reference.source} is the policy with its adapter disabled: it has "
            "no weights of its own to move. Use a frozen copy of the adapter."
        )
    if reference.kind == "copy" and is_adapted(policy.lm):
        raise PolicyError(
            f"reference.path is {reference.source}, a separate model, but the policy trains an "
            "adapter: their weights do not correspond, so the reference cannot move. Leave "
            "reference.path out, or keep the reference fixed."
        )


def _refuse_other_tensors(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], reference: Reference
) -> None:
    """Refuse tensors that do not match the policy's, or share storage with them."""
    for name, p in ours.items():
        if name not in theirs or theirs[name].shape != p.shape:
            found = tuple(theirs[name].shape) if name in theirs else "missing"
            raise PolicyError(
                f"reference.path is {reference.source}: its {name} is {found}, but the policy's is "
                f"{tuple(p.shape)}, so it cannot move to the policy. Use a model of the same "
                "shapes, or keep the reference fixed."
            )
        if theirs[name].untyped_storage().data_ptr() == p.untyped_storage().data_ptr():
            raise PolicyError(
                f"the reference shares {name} with the policy, so it would follow every update and "
                "the KL would stay 0. Copy the weights before training."
            )


@torch.no_grad()
def _refuse_other_model(policy: TokenScorer, ours: dict[str, Tensor], reference: Reference) -> None:
    """Refuse a model whose log-probs differ from the policy's when it has the policy's weights."""
    layout = probe_layout(policy.lm, policy.device)
    expected = policy(layout).logp
    borrowed = {f"lm.{name}": p for name, p in ours.items()}
    found = functional_call(reference.scorer, borrowed, (layout,)).logp
    apart = float((found - expected).abs().max())
    if not apart <= LIMIT:
        raise PolicyError(
            f"reference.path is {reference.source}: with the policy's weights its log-probs differ "
            f"from the policy's by {apart:.1e} (limit {LIMIT:.0e}), so its config differs and it "
            "cannot become the policy. Keep the reference fixed, or use a model of the same "
            "config."
        )
