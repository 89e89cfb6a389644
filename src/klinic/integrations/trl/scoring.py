"""Scores batches with TRL's own method, without side effects on the trainer."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from klinic.maths.kl_inputs import KLInputs

IMAGES = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes"),
    *("num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)
"""Batch keys of vision models, passed on unchanged."""
CONTROLLER = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")
"""Trainer attributes that its loss updates."""

LOGP_REF = "klinic_logp_ref"
"""Batch key of the reference's log-probs where klinic computes them and TRL does not."""

Score = Callable[..., Any]
"""TRL's `_get_per_token_logps_and_entropies`, bound to a trainer."""
Batch = Mapping[str, Any]


@contextmanager
def unseen(trainer: Any) -> Iterator[None]:
    """Restore RNG state, metrics and the entropy controller on exit."""
    device = trainer.accelerator.device
    metrics = trainer._metrics
    controller = {name: getattr(trainer, name) for name in CONTROLLER if hasattr(trainer, name)}
    trainer._metrics = {mode: defaultdict(list) for mode in metrics}
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        trainer._metrics = metrics
        for name, value in controller.items():
            setattr(trainer, name, value)


def logp_of(score: Score, model: Any, batch: Batch, *, size: int | None = None) -> Tensor:
    """Return TRL's log-probs of a batch's completions, padding included."""
    found = score(
        model,
        torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
        torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
        batch["completion_ids"].size(1),
        batch_size=size,
        **{name: batch[name] for name in IMAGES if batch.get(name) is not None},
    )
    logp: Tensor = found[0]
    return logp


def trained_on(batch: Batch) -> Tensor:
    """Return the mask of the trained tokens of a batch."""
    mask: Tensor = batch["completion_mask"]
    return (mask * batch["tool_mask"] if "tool_mask" in batch else mask).bool()


def some_rows(batch: Batch, rows: Sequence[int]) -> dict[str, Any]:
    """Return the selected rows of a batch."""
    length = len(batch["completion_ids"])
    return {name: _taken(value, rows, length) for name, value in batch.items()}


def _taken(value: Any, rows: Sequence[int], length: int) -> Any:
    if isinstance(value, Tensor) and value.dim() > 0 and len(value) == length:
        return value[list(rows)]
    if isinstance(value, list) and len(value) == length:
        return [value[row] for row in rows]
    return value


def unpadded(batch: Batch, row: int) -> dict[str, Any]:
    """Return one row alone, without padding."""
    alone = some_rows(batch, [row])
    prompt = alone["prompt_mask"][0].bool()
    length = max(1, int(alone["completion_mask"][0].sum()))
    for name in ("prompt_ids", "prompt_mask"):
        alone[name] = alone[name][:, prompt]
    for name, value in alone.items():
        if name not in {"prompt_ids", "prompt_mask"} and _is_by_token(value, batch):
            alone[name] = value[:, :length]
    return alone


def _is_by_token(value: Any, batch: Batch) -> bool:
    longest = batch["completion_ids"].size(1)
    return isinstance(value, Tensor) and value.dim() == 2 and value.size(1) == longest


def reference_logp(batch: Batch) -> Tensor | None:
    """Return the reference's log-probs: TRL's, else klinic's, else None."""
    logp: Tensor | None = batch.get("ref_per_token_logps", batch.get(LOGP_REF))
    return logp


def kl_inputs(logp: Tensor, batch: Batch, *, hears_sampler: bool = True) -> KLInputs:
    """Return the trained tokens of a padded batch, concatenated, as inputs of a KL term.

    TRL's own term ignores the sampler's log-probs: its ratio is to the old log-probs, even where
    vLLM sampled the tokens and reports different ones.
    """
    inside, ref = trained_on(batch), reference_logp(batch)
    assert ref is not None  # noqa: S101 - called only with a reference
    old = batch.get("old_per_token_logps")
    old = logp.detach() if old is None else old
    sampler = batch.get("sampling_per_token_logps") if hears_sampler else None
    sampler = old if sampler is None else torch.where(sampler.isnan(), old, sampler)
    ends = torch.cat([inside.new_zeros(1, dtype=torch.int64), inside.sum(1).cumsum(0)])
    return KLInputs(
        group=torch.arange(len(inside), device=logp.device),
        row_offsets=ends,
        logp=logp[inside],
        logp_old=old[inside],
        logp_sampler=sampler[inside],
        logp_ref=ref[inside],
        loss_mask=inside[inside],
    )
