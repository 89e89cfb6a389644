"""Metrics of one step: record, rewards, updates and timing."""

from collections.abc import Mapping
from dataclasses import replace

from klinic.evidence.metrics import clip_metrics, penalized_reward, step_metrics
from klinic.evidence.record import StepRecord
from klinic.loop.state import StepDone
from klinic.recipe.learner import LearnerSection


def metrics_of(
    done: StepDone, rewards: Mapping[str, float], learner: LearnerSection
) -> dict[str, float]:
    """Return every metric of a step by name."""
    metrics = {**rewards, **step_metrics(done.record)}
    metrics |= clip_metrics(
        done.last_record,
        clip_low=learner.clip_low,
        clip_high=learner.clip_high,
        by_sequence=learner.loss == "gspo",
    )
    metrics |= done.metrics
    metrics |= penalized_reward(done.record, done.kl_coef)
    if "kl" in metrics:
        metrics["kl_penalty"] = done.kl_coef * metrics["kl"]
    metrics["loss"] = metrics["policy_loss"] + metrics.get("kl_penalty", 0.0)
    metrics["discarded"] = float(done.discarded)
    return metrics | {f"time/{name}": seconds for name, seconds in done.seconds.items()}


def with_facts(done: StepDone, metrics: Mapping[str, float]) -> StepRecord:
    """Return the record of a step with the facts of its updates."""
    # all from the last update, like the metrics
    names = ("loss", "grad_norm", "learning_rate", "update_norm", "unchanged_share")
    known = {name: metrics[name] for name in names if name in metrics}
    return replace(done.record, facts={**done.record.facts, **known})
