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

from klinic.integrations.trl.scoring import (
    Batch,
    Score,
    score_completions,
    trained_mask,
    without_side_effects,
)
from klinic.model.adapters import (
    base_digest,
    base_weights,
    has_adapter,
    policy_digest,
    starts_at_zero,
)
from klinic.model.weights import digest, sampled_digest, state_tensors, trainable_tensors

TRL_ADAPTER = "ref"  # TRL's name for the frozen copy of an adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class TRLReference:
    """The reference policy: its origin, digests and scoring."""

    kind: str
    source: str
    digest: str
    start_digest: str
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
    def completion_logp(self, score: Score, batch: Batch, *, size: int | None = None) -> Tensor:
        """Return the reference's log-probs of a batch."""
        with self._model() as model:
            return score_completions(score, model, batch, size=size)


def unwrap_policy(trainer: Any) -> Any:
    """Return the trained model without the wrapper of a launcher."""
    model = trainer.model
    if isinstance(model, PreTrainedModel):  # not wrapped; unwrap_model takes a millisecond
        return model
    return trainer.accelerator.unwrap_model(model)


def find_reference(trainer: Any, *, monitored: bool) -> TRLReference | None:
    """Return the reference of a trainer, or one for monitoring where it has none."""
    lm = unwrap_policy(trainer)
    if trainer.beta == 0:
        return _reference_from_snapshot(lm) if monitored else None
    if trainer.ref_model is not None:
        return _reference_from_copy(trainer, lm)
    return (
        _reference_from_frozen_adapter(lm)
        if TRL_ADAPTER in lm.peft_config
        else _reference_without_adapter(lm)
    )


def _reference_from_copy(trainer: Any, lm: Any) -> TRLReference:
    model = trainer.ref_model
    reference_model = trainer.accelerator.unwrap_model(model)

    @contextmanager
    def as_reference() -> Iterator[Any]:
        yield model

    return TRLReference(
        kind="copy",
        source=str(reference_model.config._name_or_path),
        digest=digest(state_tensors(reference_model)),
        start_digest=policy_digest(lm),
        num_bytes=0,
        _model=as_reference,
        _weights=lambda: dict(reference_model.named_parameters()),
    )


def _reference_without_adapter(lm: Any) -> TRLReference:
    @contextmanager
    def as_reference() -> Iterator[Any]:
        with lm.disable_adapter():
            yield lm

    base = base_digest(lm)
    assert base is not None  # noqa: S101 - it has an adapter
    return TRLReference(
        kind="adapter_off",
        source=str(lm.config._name_or_path),
        digest=base,
        start_digest=base if starts_at_zero(lm) else policy_digest(lm),
        num_bytes=0,
        _model=as_reference,
        _weights=lambda: base_weights(lm),
    )


def _reference_from_frozen_adapter(lm: Any) -> TRLReference:
    from trl.trainer.utils import use_adapter

    @contextmanager
    def as_reference() -> Iterator[Any]:
        with use_adapter(lm, adapter_name=TRL_ADAPTER):
            yield lm

    def frozen_weights() -> dict[str, Tensor]:
        adapter_weights = {n: p for n, p in lm.named_parameters() if f".{TRL_ADAPTER}." in n}
        return {n.replace(f".{TRL_ADAPTER}.", ".default."): p for n, p in adapter_weights.items()}

    return TRLReference(
        kind="adapter_frozen",
        source=str(lm.config._name_or_path),
        digest=digest(frozen_weights()),
        start_digest=digest(trainable_tensors(lm)),
        num_bytes=0,
        _model=as_reference,
        _weights=frozen_weights,
    )


def _reference_from_snapshot(lm: Any) -> TRLReference:
    """Return a reference with the current weights of the policy."""
    if has_adapter(lm) and starts_at_zero(lm):
        return _reference_without_adapter(lm)
    snapshot = {name: p.detach().clone() for name, p in trainable_tensors(lm).items()}

    @contextmanager
    def as_reference() -> Iterator[Any]:
        live = trainable_tensors(lm)
        current = {name: p.data for name, p in live.items()}
        for name, p in live.items():
            p.data = snapshot[name]
        try:
            yield lm
        finally:
            for name, p in live.items():
                p.data = current[name]

    start = digest(snapshot)
    return TRLReference(
        kind="copy",
        source=str(lm.config._name_or_path),
        digest=start,
        start_digest=start,
        num_bytes=sum(p.nbytes for p in snapshot.values()),
        _model=as_reference,
        _weights=lambda: snapshot,
    )


@torch.no_grad()
def distance_at_start(trainer: Any, score: Score, reference: TRLReference, batch: Batch) -> float:
    """Return the largest log-prob difference between policy and reference on a batch, in nats.

    Both are scored with the same shapes and RNG state: equal weights give exactly 0.
    """
    with without_side_effects(trainer):
        policy_logp = score_completions(score, trainer.model, batch)
    with without_side_effects(trainer):
        reference_logp = reference.completion_logp(score, batch)
    mask = trained_mask(batch)
    difference = (policy_logp - reference_logp).abs()[mask]
    return float(difference.max()) if difference.numel() else 0.0


def describe_reference(reference: TRLReference, difference: float, num_tokens: int) -> str:
    """Return a sentence on whether the reference equals the initial policy."""
    relation = "equal to" if reference.digest == reference.start_digest else "different from"
    size = f", {reference.num_bytes / 1e6:.1f} MB stored" if reference.num_bytes else ""
    summary = (
        f"Reference: {reference.kind} of {reference.source}, "
        f"weights {relation} those of the initial "
        f"policy{size}."
    )
    if difference == 0:
        return f"{summary} The KL is exactly 0 on {num_tokens} tokens before the first update."
    return (
        f"{summary} Before the first update its log-probs differ from the policy's by up to "
        f"{difference:.3g} nats and should be equal: the KL "
        "will not measure the effect of training."
    )
