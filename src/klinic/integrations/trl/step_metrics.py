"""Metrics of a TRL step, from its record."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from klinic.evidence.metrics import clip_metrics, step_metrics
from klinic.evidence.record import StepRecord
from klinic.integrations.trl import describe
from klinic.integrations.trl.records import ROW, Trained

FIGURES = ("mean", "max", "p99", "share_above")
SHOWN = tuple(f"kl_{name}/{figure}" for name in ("k1", "k3") for figure in FIGURES)
"""KL metrics that TRL's own log gets as well, under `klinic/`."""


def metrics_of(record: StepRecord, args: Any, *, kl_coef: float) -> dict[str, float]:
    """Return every metric of a record, with the keys of klinic's own runs."""
    facts = {name: record.facts.get(name) for name in ("loss", "grad_norm", "learning_rate")}
    metrics = {name: float(value) for name, value in facts.items() if value is not None}
    metrics["kl_coef"] = kl_coef
    rewards = {
        "reward": record.reward,
        **{f"rewards/{name}/mean": part for name, part in record.reward_parts.items()},
    }
    for name, values in rewards.items():
        if values is not None and np.isfinite(values).any():
            metrics[name] = float(np.nanmean(values))
    metrics |= step_metrics(record)
    metrics |= clip_metrics(
        record,
        clip_low=args.epsilon,
        clip_high=describe.clip_high(args),
        by_sequence=args.importance_sampling_level == "sequence",
    )
    return metrics


def parse_rate(batches: Sequence[Trained], parse: Callable[[str], Any] | None) -> dict[str, float]:
    """Return the fraction of completions with a parsable answer; empty without `parse`."""
    if parse is None:
        return {}
    rows = [(batch.drawn, number) for batch in batches for number in batch.inputs[ROW].tolist()]
    parsed = [parse(drawn.texts[number]) is not None for drawn, number in rows]
    return {"completions/parse_rate": sum(parsed) / max(len(parsed), 1)}
