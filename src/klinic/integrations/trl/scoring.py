"""Scores batches with TRL's own method, without side effects on the trainer."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from klinic.maths.kl_inputs import KLInputs

IMAGE_KEYS = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes"),
    *("num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)
"""Batch keys of vision models, passed on unchanged."""
ENTROPY_ATTRIBUTES = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")
"""Trainer attributes that its loss updates."""

LOGP_REF_COLUMN = "klinic_logp_ref"
"""Batch key of the reference's log-probs where klinic computes them and TRL does not."""

Score = Callable[..., Any]
"""TRL's `_get_per_token_logps_and_entropies`, bound to a trainer."""
Batch = Mapping[str, Any]


@contextmanager
def without_side_effects(trainer: Any) -> Iterator[None]:
    """Restore RNG state, metrics and the entropy controller on exit."""
    device = trainer.accelerator.device
    metrics = trainer._metrics
    controller = {
        name: getattr(trainer, name) for name in ENTROPY_ATTRIBUTES if hasattr(trainer, name)
    }
    trainer._metrics = {mode: defaultdict(list) for mode in metrics}
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        trainer._metrics = metrics
        for name, value in controller.items():
            setattr(trainer, name, value)


def score_completions(score: Score, model: Any, batch: Batch, *, size: int | None = None) -> Tensor:
    """Return TRL's log-probs of a batch's completions, padding included."""
    outputs = score(
        model,
        torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
        torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
        batch["completion_ids"].size(1),
        batch_size=size,
        **{name: batch[name] for name in IMAGE_KEYS if batch.get(name) is not None},
    )
    logp: Tensor = outputs[0]
    return logp


def trained_mask(batch: Batch) -> Tensor:
    """Return the mask of the trained tokens of a batch."""
    mask: Tensor = batch["completion_mask"]
    return (mask * batch["tool_mask"] if "tool_mask" in batch else mask).bool()


def select_rows(batch: Batch, rows: Sequence[int]) -> dict[str, Any]:
    """Return the selected rows of a batch."""
    length = len(batch["completion_ids"])
    return {name: _select_entries(value, rows, length) for name, value in batch.items()}


def _select_entries(value: Any, rows: Sequence[int], length: int) -> Any:
    if isinstance(value, Tensor) and value.dim() > 0 and len(value) == length:
        return value[list(rows)]
    if isinstance(value, list) and len(value) == length:
        return [value[row] for row in rows]
    return value


def unpad_row(batch: Batch, row: int) -> dict[str, Any]:
    """Return one row alone, without padding."""
    single_row = select_rows(batch, [row])
    prompt = single_row["prompt_mask"][0].bool()
    length = max(1, int(single_row["completion_mask"][0].sum()))
    for name in ("prompt_ids", "prompt_mask"):
        single_row[name] = single_row[name][:, prompt]
    for name, value in single_row.items():
        if name not in {"prompt_ids", "prompt_mask"} and _has_token_axis(value, batch):
            single_row[name] = value[:, :length]
    return single_row


def _has_token_axis(value: Any, batch: Batch) -> bool:
    longest = batch["completion_ids"].size(1)
    return isinstance(value, Tensor) and value.dim() == 2 and value.size(1) == longest


def reference_logp(batch: Batch) -> Tensor | None:
    """Return the reference's log-probs: TRL's, else klinic's, else None."""
    logp: Tensor | None = batch.get("ref_per_token_logps", batch.get(LOGP_REF_COLUMN))
    return logp


def kl_inputs(logp: Tensor, batch: Batch, *, uses_sampler_logp: bool = True) -> KLInputs:
    """Return the trained tokens of a padded batch, concatenated, as inputs of a KL term.

    TRL's own term ignores the sampler's log-probs: its ratio is to the old log-probs, even where
    vLLM sampled the tokens and reports different ones.
    """
    mask, logp_ref = trained_mask(batch), reference_logp(batch)
    assert logp_ref is not None  # noqa: S101 - called only with a reference
    logp_old = batch.get("old_per_token_logps")
    logp_old = logp.detach() if logp_old is None else logp_old
    logp_sampler = batch.get("sampling_per_token_logps") if uses_sampler_logp else None
    logp_sampler = (
        logp_old
        if logp_sampler is None
        else torch.where(logp_sampler.isnan(), logp_old, logp_sampler)
    )
    row_offsets = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.sum(1).cumsum(0)])
    return KLInputs(
        group=torch.arange(len(mask), device=logp.device),
        row_offsets=row_offsets,
        logp=logp[mask],
        logp_old=logp_old[mask],
        logp_sampler=logp_sampler[mask],
        logp_ref=logp_ref[mask],
        loss_mask=mask[mask],
    )
