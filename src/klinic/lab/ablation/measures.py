"""The measures of a trial."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from klinic.doctor.cases import entries_by_step, merge_entries
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import METRICS
from klinic.report.live import seconds_of

if TYPE_CHECKING:
    from klinic.training.compare import Evaluation

CURVES = ("reward", "kl", "entropy", "grad_norm", "completions/mean_length", "eval/accuracy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A column of the results."""

    name: str
    label: str
    """Column title in tables."""
    meaning: str


MEASURES = tuple(
    Measure(name=name, label=label, meaning=meaning)
    for name, label, meaning in (
        ("accuracy", "accuracy", "held-out accuracy, greedy; mean reward for a user's dataset"),
        ("gain", "gain", "accuracy minus that of the initial model"),
        ("reward", "reward", "held-out mean of the recipe's rewards, greedy"),
        (
            "retention",
            "retention",
            "held-out accuracy on untrained skills, relative to the initial model",
        ),
        (
            "kl_token",
            "KL/token",
            "exact KL to the initial model on its own completions, nats per token",
        ),
        ("kl_sequence", "KL/completion", "the same, summed over a completion"),
        ("entropy", "entropy", "mean of the last tenth of the steps, nats per token"),
        ("grad_norm_median", "grad norm", "median over steps, before clipping"),
        ("grad_norm_max", "max grad norm", "largest of any step"),
        ("kl_max", "max KL", "largest mean KL of any step, nats per token (k3)"),
        ("reward_std", "reward spread", "standard deviation of rewards in a step, mean over steps"),
        ("num_tokens", "tokens", "trained tokens"),
        ("seconds", "seconds", "of all steps, without evaluations and checkpoints"),
    )
)


SCORE = Measure(
    name="score",
    label="score",
    meaning="mean of the trained skill and retention, by which settings are ranked",
)


def measure_run(run: Path, evaluation: "Evaluation") -> dict[str, Any]:
    """Return the measures of a finished run."""
    steps = [entry for entry in Journal(run / METRICS).entries() if "loss" in entry]
    accuracy, before = _accuracy_and_baseline(evaluation)
    last = steps[-max(1, len(steps) // 10) :]
    norms = _finite_values(steps, "grad_norm")
    return {
        "accuracy": accuracy,
        "gain": None if accuracy is None or before is None else accuracy - before,
        "reward": evaluation.reward,
        "retention": evaluation.retention,
        "kl_token": None if evaluation.kl is None else evaluation.kl.per_token,
        "kl_sequence": None if evaluation.kl is None else evaluation.kl.per_sequence,
        "entropy": _mean_or_none(_finite_values(last, "entropy")),
        "grad_norm_median": median(norms) if norms else None,
        "grad_norm_max": max(norms, default=None),
        "kl_max": max(_finite_values(steps, "kl"), default=None),
        "reward_std": _mean_or_none(_finite_values(steps, "reward_std")),
        "num_tokens": sum(_finite_values(steps, "num_tokens")),
        "seconds": sum(seconds_of(step) or 0.0 for step in steps),
    }


def read_curves(run: Path) -> list[dict[str, float]]:
    """Return the plotted metrics of every step; those of an evaluation belong to its step."""
    steps = (merge_entries(lines) for _, lines in sorted(entries_by_step(run / METRICS).items()))
    return [
        {name: step[name] for name in ("step", *CURVES) if step.get(name) is not None}
        for step in steps
    ]


def _accuracy_and_baseline(evaluation: "Evaluation") -> tuple[float | None, float | None]:
    if evaluation.trained is None:
        return evaluation.reward, evaluation.reference_reward
    before = evaluation.reference_accuracy
    return evaluation.accuracy[evaluation.trained], None if before is None else before[
        evaluation.trained
    ]


def _finite_values(steps: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    values = (step.get(name) for step in steps)
    return [value for value in values if value is not None and math.isfinite(value)]


def _mean_or_none(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
