"""TRL's own scoring, asked for once more, without a trace."""

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
"""What a batch may hold for models that see; given on as it is."""
CONTROLLER = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")
"""Attributes of a trainer that its loss moves."""

LOGP_REF = "klinic_logp_ref"
"""The reference's log-probs in a batch, where klinic has asked for them and TRL has none."""

Score = Callable[..., Any]
"""TRL's `_get_per_token_logps_and_entropies`, bound to a trainer."""
Batch = Mapping[str, Any]


@contextmanager
def unseen(trainer: Any) -> Iterator[None]:
    """Leave random streams, metrics and the entropy controller as they were."""
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
    """Return the log-probs of a batch's completions, padding included, as TRL scores them."""
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
    """Return which tokens of a batch are trained on."""
    mask: Tensor = batch["completion_mask"]
    return (mask * batch["tool_mask"] if "tool_mask" in batch else mask).bool()


def some_rows(batch: Batch, rows: Sequence[int]) -> dict[str, Any]:
    """Return these rows of a batch."""
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
    """Return the reference's log-probs: TRL's, or those that klinic asked for."""
    logp: Tensor | None = batch.get("ref_per_token_logps", batch.get(LOGP_REF))
    return logp


def kl_inputs(logp: Tensor, batch: Batch, *, hears_sampler: bool = True) -> KLInputs:
    """Return the trained tokens of a padded batch, row behind row, as a KL term sees them.

    TRL's own term does not hear the sampler: its ratio is to the old log-probs, also where vLLM
    drew the tokens and reports others.
    """
    inside, ref = trained_on(batch), reference_logp(batch)
    assert ref is not None  # noqa: S101 - asked only with a reference
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
