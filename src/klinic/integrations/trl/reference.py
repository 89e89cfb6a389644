"""The reference policy of a TRL run, and the check that it equals the initial policy.

    beta   PEFT                 reference                          kind             costs
    > 0    no                   `ref_model`, loaded from disk      copy             TRL's own
    > 0    new adapter          the adapter switched off           adapter_off      TRL's own
    > 0    existing adapter     TRL's frozen copy, "ref"           adapter_frozen   TRL's own
    0      adapter that adds 0  the adapter switched off           adapter_off      no weights
    0      anything else        the initial trained weights        copy             those weights

At beta 0 TRL has no reference: klinic stores one only to monitor the KL. While it scores, the
parameters point to the stored weights; no data is copied.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from klinic.integrations.trl.scoring import Batch, Score, logp_of, trained_on, unseen
from klinic.model.adapters import (
    base_digest,
    base_weights,
    is_adapted,
    policy_digest,
    starts_at_zero,
)
from klinic.model.weights import digest, sampled_digest, trained

THEIRS = "ref"  # TRL's name for the frozen copy of an adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The reference policy: its origin, digests and scoring."""

    kind: str
    source: str
    digest: str
    start: str
    """Digest of the initial policy: equal to `digest` if both have the same weights."""
    num_bytes: int
    """Size of the weights that klinic stores for it."""
    _model: Callable[[], Any]
    """A context manager that yields a model which scores as the reference."""
    _weights: Callable[[], Mapping[str, Tensor]]

    def fingerprint(self) -> str:
        """Return a fingerprint of its current weights."""
        return sampled_digest(self._weights())

    @torch.no_grad()
    def logp(self, score: Score, batch: Batch, *, size: int | None = None) -> Tensor:
        """Return the reference's log-probs of a batch."""
        with self._model() as model:
            return logp_of(score, model, batch, size=size)


def policy_of(trainer: Any) -> Any:
    """Return the trained model without the wrapper of a launcher."""
    model = trainer.model
    if isinstance(model, PreTrainedModel):  # not wrapped; unwrap_model takes a millisecond
        return model
    return trainer.accelerator.unwrap_model(model)


def reference_of(trainer: Any, *, monitored: bool) -> Reference | None:
    """Return the reference of a trainer, or one for monitoring where it has none."""
    lm = policy_of(trainer)
    if trainer.beta == 0:
        return _kept(lm) if monitored else None
    if trainer.ref_model is not None:
        return _copy(trainer, lm)
    return _frozen(lm) if THEIRS in lm.peft_config else _adapter_off(lm)


def _copy(trainer: Any, lm: Any) -> Reference:
    model = trainer.ref_model
    theirs = trainer.accelerator.unwrap_model(model)

    @contextmanager
    def in_force() -> Iterator[Any]:
        yield model

    return Reference(
        kind="copy",
        source=str(theirs.config._name_or_path),
        digest=digest(theirs.state_dict()),
        start=policy_digest(lm),
        num_bytes=0,
        _model=in_force,
        _weights=lambda: dict(theirs.named_parameters()),
    )


def _adapter_off(lm: Any) -> Reference:
    @contextmanager
    def in_force() -> Iterator[Any]:
        with lm.disable_adapter():
            yield lm

    base = base_digest(lm)
    assert base is not None  # noqa: S101 - it has an adapter
    return Reference(
        kind="adapter_off",
        source=str(lm.config._name_or_path),
        digest=base,
        start=base if starts_at_zero(lm) else policy_digest(lm),
        num_bytes=0,
        _model=in_force,
        _weights=lambda: base_weights(lm),
    )


def _frozen(lm: Any) -> Reference:
    from trl.trainer.utils import use_adapter

    @contextmanager
    def in_force() -> Iterator[Any]:
        with use_adapter(lm, adapter_name=THEIRS):
            yield lm

    def frozen() -> dict[str, Tensor]:
        own = {n: p for n, p in lm.named_parameters() if f".{THEIRS}." in n}
        return {n.replace(f".{THEIRS}.", ".default."): p for n, p in own.items()}

    return Reference(
        kind="adapter_frozen",
        source=str(lm.config._name_or_path),
        digest=digest(frozen()),
        start=digest(trained(lm)),
        num_bytes=0,
        _model=in_force,
        _weights=frozen,
    )


def _kept(lm: Any) -> Reference:
    """Return a reference with the current weights of the policy."""
    if is_adapted(lm) and starts_at_zero(lm):
        return _adapter_off(lm)
    kept = {name: p.detach().clone() for name, p in trained(lm).items()}

    @contextmanager
    def in_force() -> Iterator[Any]:
        live = trained(lm)
        current = {name: p.data for name, p in live.items()}
        for name, p in live.items():
            p.data = kept[name]
        try:
            yield lm
        finally:
            for name, p in live.items():
                p.data = current[name]

    start = digest(kept)
    return Reference(
        kind="copy",
        source=str(lm.config._name_or_path),
        digest=start,
        start=start,
        num_bytes=sum(p.nbytes for p in kept.values()),
        _model=in_force,
        _weights=lambda: kept,
    )


@torch.no_grad()
def distance_at_start(trainer: Any, score: Score, reference: Reference, batch: Batch) -> float:
    """Return the largest log-prob difference between policy and reference on a batch, in nats.

    Both are scored with the same shapes and RNG state: equal weights give exactly 0.
    """
    with unseen(trainer):
        ours = logp_of(score, trainer.model, batch)
    with unseen(trainer):
        theirs = reference.logp(score, batch)
    inside = trained_on(batch)
    apart = (ours - theirs).abs()[inside]
    return float(apart.max()) if apart.numel() else 0.0


def identity(reference: Reference, apart: float, num_tokens: int) -> str:
    """Return a sentence on whether the reference equals the initial policy."""
    same = "equal to" if reference.digest == reference.start else "different from"
    size = f", {reference.num_bytes / 1e6:.1f} MB stored" if reference.num_bytes else ""
    said = (
        f"Reference: {reference.kind} of {reference.source}, weights {same} those of the initial "
        f"policy{size}."
    )
    if apart == 0:
        return f"{said} The KL is exactly 0 on {num_tokens} tokens before the first update."
    return (
        f"{said} Before the first update its log-probs differ from the policy's by up to "
        f"{apart:.3g} nats and should be equal: the KL will not measure the effect of training."
    )
