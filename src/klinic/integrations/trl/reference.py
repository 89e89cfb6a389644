"""The policy that a TRL run's KL is measured to, and proof that it is where the run starts.

    beta   PEFT                 reference                          kind             costs
    > 0    no                   `ref_model`, loaded from disk      copy             TRL's own
    > 0    new adapter          the adapter switched off           adapter_off      TRL's own
    > 0    adapter of before    TRL's frozen copy, "ref"           adapter_frozen   TRL's own
    0      adapter that adds 0  the adapter switched off           adapter_off      no weights
    0      anything else        the trained weights as they start  copy             those weights

At beta 0 TRL has none: klinic keeps one only where it is asked to watch the KL. The trained weights
are then put in the place of the current ones while the reference scores; none is moved in memory.
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

THEIRS = "ref"  # TRL's name of a frozen copy of an adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A policy to score with."""

    kind: str
    source: str
    digest: str
    start: str
    """Digest of what it should be: that of the policy where both have the same weights."""
    num_bytes: int
    """Of weights that klinic keeps for it."""
    _model: Callable[[], Any]
    """A context in which a model scores as the reference."""
    _weights: Callable[[], Mapping[str, Tensor]]

    def fingerprint(self) -> str:
        """Return a fingerprint of its weights as they are."""
        return sampled_digest(self._weights())

    @torch.no_grad()
    def logp(self, score: Score, batch: Batch, *, size: int | None = None) -> Tensor:
        """Return its log-probs of a batch."""
        with self._model() as model:
            return logp_of(score, model, batch, size=size)


def policy_of(trainer: Any) -> Any:
    """Return the trained model without what a launcher wrapped around it."""
    model = trainer.model
    if isinstance(model, PreTrainedModel):  # nothing is, and to make sure takes a millisecond
        return model
    return trainer.accelerator.unwrap_model(model)


def reference_of(trainer: Any, *, monitored: bool) -> Reference | None:
    """Return the reference of a trainer, or one to watch the KL by where it has none."""
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
    """Return the policy as it is now, to stay so."""
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
    """Return the largest difference between policy and reference on a batch, in nats.

    Both are scored in the same shapes from the same random state: equal weights give 0 exactly.
    """
    with unseen(trainer):
        ours = logp_of(score, trainer.model, batch)
    with unseen(trainer):
        theirs = reference.logp(score, batch)
    inside = trained_on(batch)
    apart = (ours - theirs).abs()[inside]
    return float(apart.max()) if apart.numel() else 0.0


def identity(reference: Reference, apart: float, num_tokens: int) -> str:
    """Say whether a reference is where the policy starts."""
    same = "the policy's own at the start" if reference.digest == reference.start else "another's"
    size = f", {reference.num_bytes / 1e6:.1f} MB kept for it" if reference.num_bytes else ""
    said = f"Reference: {reference.kind} of {reference.source}, its weights are {same}{size}."
    if apart == 0:
        return f"{said} The KL is exactly 0 on {num_tokens} tokens before the first update."
    return (
        f"{said} Before the first update it is {apart:.3g} nats away from the policy on a token, "
        "and should be exactly 0: the KL will not measure what is learnt."
    )
