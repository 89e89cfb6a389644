"""Active probes of a live TRL trainer.

Probes leave weights, gradients and RNG state unchanged: `torch.autograd.grad` does not touch
`parameter.grad`. They use a few completions and compare with an implementation independent of
TRL's loss.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from klinic.integrations.trl.scoring import (
    Batch,
    Score,
    kl_inputs,
    logp_of,
    some_rows,
    trained_on,
    unpadded,
    unseen,
)
from klinic.integrations.trl.token_weights import KNOWN, token_weights
from klinic.learner.comparing import Answer, apart, compared, cosine, is_kept, norm, sampled_entries
from klinic.learner.questions import ALONE, LIKELY, PROMISED, ROWS
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.model.dropout import largest_dropout
from klinic.model.weights import trained

LOCAL = ("bnpo",)
"""Losses that divide by a micro-batch's own tokens: splitting changes them by design."""
BY_VOCABULARY = ("exact", "topk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A trainer, its scoring and loss, and the batch to probe it on."""

    trainer: Any
    model: Any
    score: Score
    loss: Callable[[Any, Batch], Tensor]
    estimator: str | None
    """Estimator of the KL term in the loss; None without one."""
    hears_sampler: bool
    """Whether the term weights tokens by the sampler's log-probs; TRL's own does not."""
    coefficient: Callable[[float], AbstractContextManager[None]]
    """A context manager that overrides the coefficient of the term."""
    batch: Batch
    """Some rows of a micro-batch."""
    logp_sampler: list[np.ndarray] | None
    """The sampler's log-probs of these rows."""


def asked_rows(batch: Batch) -> list[int]:
    """Return the rows to probe: an even number, so that they can be halved."""
    rows = min(ROWS, len(batch["completion_ids"]))
    return list(range(rows if rows < 2 else rows // 2 * 2))


def ask(asked: Asked) -> dict[str, Answer]:
    """Return the result of every probe that this trainer supports."""
    with unseen(asked.trainer):
        first, second = _logp(asked, asked.batch), _logp(asked, asked.batch)
    inside = trained_on(asked.batch)
    answers: dict[str, Answer] = {}
    if inside.any():
        answers["rescore"] = apart(first[inside], second[inside])
        answers["rescore_alone"] = _alone(asked, first)
    if (
        asked.estimator in PROMISED
        and asked.estimator not in BY_VOCABULARY
        and asked.trainer.loss_type in KNOWN
    ):
        answers["kl_gradient"] = _kl_gradient(asked, str(asked.estimator))
    # dropout samples another mask for another shape: halves would differ by chance
    still = largest_dropout(asked.model) == 0
    if still and len(inside) > 1 and asked.trainer.loss_type not in LOCAL:
        answers["micro_batches"] = _halved(asked)
    return answers


@torch.no_grad()
def _logp(asked: Asked, batch: Batch) -> Tensor:
    return logp_of(asked.score, asked.model, batch).detach()


def _alone(asked: Asked, together: Tensor) -> Answer:
    """Score some rows alone, unpadded, and compare them with the batch scores."""
    ours, theirs = [], []
    for row in sorted(_suspects(asked, together)):
        one = unpadded(asked.batch, row)
        inside = trained_on(one)[0]
        with unseen(asked.trainer):
            ours.append(_logp(asked, one)[0][inside])
        theirs.append(together[row, : len(inside)][inside])
    return apart(torch.cat(ours), torch.cat(theirs))


def _suspects(asked: Asked, logp: Tensor) -> set[int]:
    inside = trained_on(asked.batch)
    used = torch.nonzero(inside.any(dim=1))[:, 0].tolist()
    spread = {used[at] for at in np.linspace(0, len(used) - 1, ALONE // 2).astype(int)}
    if asked.logp_sampler is None:
        return spread
    ours = logp.float().cpu().numpy()
    far = [
        float(np.nansum(np.abs(ours[row, : len(said)] - said)))
        for row, said in enumerate(asked.logp_sampler)
    ]
    farthest = sorted(used, key=lambda row: -far[row])[: ALONE // 2]
    return {*spread, *farthest}


def _kl_gradient(asked: Asked, name: str) -> Answer:
    """Compare the KL part of the loss gradient with the gradient promised by its name."""
    still = {**asked.batch, "advantages": torch.zeros_like(asked.batch["advantages"])}
    found = _gradient(asked, still, coef=1.0) - _gradient(asked, still, coef=0.0)
    promised = _promised(asked, name)
    if is_kept(found, promised):
        return {**compared(found, promised), "score_norm": None, "looks_like": name}
    others = {key: _promised(asked, key) for key in {*LIKELY, name}}
    alike = {key: abs(cosine(found, v)) for key, v in others.items()}
    return {
        **compared(found, promised),
        "score_norm": norm(others["k1"]),
        "looks_like": max(alike, key=lambda key: alike[key]),
    }


def _halved(asked: Asked) -> Answer:
    """Compare the gradient with that of the same rows in micro-batches of half the size."""
    whole = _gradient(asked, asked.batch)
    num = len(asked.batch["completion_ids"]) // 2
    halves = (range(num), range(num, 2 * num))
    with _twice_as_many(asked.trainer):
        parts = [_gradient(asked, some_rows(asked.batch, list(rows))) for rows in halves]
    return compared(parts[0] + parts[1], whole)


@contextmanager
def _twice_as_many(trainer: Any) -> Iterator[None]:
    """Double the trainer's micro-batches per step and per generation inside the context."""
    before = trainer.current_gradient_accumulation_steps, trainer.args.steps_per_generation
    trainer.current_gradient_accumulation_steps = 2 * before[0]
    trainer.args.steps_per_generation = 2 * before[1]
    try:
        yield
    finally:
        trainer.current_gradient_accumulation_steps, trainer.args.steps_per_generation = before


def _gradient(asked: Asked, batch: Batch, *, coef: float | None = None) -> Tensor:
    with unseen(asked.trainer), nullcontext() if coef is None else asked.coefficient(coef):
        return _sample(asked, asked.loss(asked.model, batch))


def _promised(asked: Asked, name: str) -> Tensor:
    """Return the gradient of the named term, from `maths` and the token weights."""
    with unseen(asked.trainer):
        logp = logp_of(asked.score, asked.model, asked.batch)
        weights = token_weights(asked.trainer, asked.batch, logp.dtype)
        inputs = kl_inputs(logp, asked.batch, hears_sampler=asked.hears_sampler)
        terms = ESTIMATORS[name].term(inputs.clean())
        return _sample(asked, (terms * weights[trained_on(asked.batch)]).sum())


def _sample(asked: Asked, loss: Tensor) -> Tensor:
    """Return evenly spaced entries of the gradient; 0 for unused parameters."""
    parameters = list(trained(asked.model).values())
    if not loss.requires_grad:
        return sampled_entries(torch.zeros_like(p) for p in parameters)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return sampled_entries(
        torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)
    )
