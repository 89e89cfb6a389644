"""Metrics of one step: record, rewards, updates and timing."""

from collections.abc import Mapping
from dataclasses import replace

from klinic.evidence.metrics import row_metrics
from klinic.evidence.record import StepRecord
from klinic.evidence.step_sample import mark_sample
from klinic.training.state import CompletedStep


def all_step_metrics(completed: CompletedStep, rewards: Mapping[str, float]) -> dict[str, float]:
    """Return every metric of a step by name."""
    metrics = {**rewards, **row_metrics(completed.all_rows), **completed.token_metrics}
    metrics |= completed.metrics
    if "kl" in metrics:
        metrics["kl_penalty"] = completed.kl_coef * metrics.get("kl_loss", 0.0)
    if "teacher_loss" in metrics:
        metrics["teacher_penalty"] = metrics["teacher_coef"] * metrics["teacher_loss"]
    metrics["loss"] = sum(
        metrics.get(name, 0.0) for name in ("policy_loss", "kl_penalty", "teacher_penalty")
    )
    metrics["discarded"] = float(completed.num_discarded)
    return metrics | {f"time/{name}": seconds for name, seconds in completed.seconds.items()}


def add_update_facts(completed: CompletedStep, metrics: Mapping[str, float]) -> StepRecord:
    """Return the record of a step with the facts of its updates."""
    # all from the last update, like the metrics
    names = ("loss", "grad_norm", "learning_rate", "update_norm", "unchanged_share")
    update_facts = {name: metrics[name] for name in names if name in metrics}
    return replace(completed.record, facts={**completed.record.facts, **update_facts})


def doctor_record(completed: CompletedStep, metrics: Mapping[str, float]) -> StepRecord:
    """Return what the live doctor sees of a step; a sample has no facts that are sums over it."""
    return mark_sample(add_update_facts(completed, metrics), completed.all_rows.num_rows)
