"""The measures of a trial."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from klinic.doctor.reading import by_step, merged
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import METRICS
from klinic.report.live import seconds_of

if TYPE_CHECKING:
    from klinic.loop.compare import Evaluation

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


def measure(run: Path, found: "Evaluation") -> dict[str, Any]:
    """Return the measures of a finished run."""
    steps = [entry for entry in Journal(run / METRICS).entries() if "loss" in entry]
    accuracy, before = _score(found)
    last = steps[-max(1, len(steps) // 10) :]
    norms = _known(steps, "grad_norm")
    return {
        "accuracy": accuracy,
        "gain": None if accuracy is None or before is None else accuracy - before,
        "reward": found.reward,
        "retention": found.retention,
        "kl_token": None if found.kl is None else found.kl.per_token,
        "kl_sequence": None if found.kl is None else found.kl.per_sequence,
        "entropy": _mean(_known(last, "entropy")),
        "grad_norm_median": median(norms) if norms else None,
        "grad_norm_max": max(norms, default=None),
        "kl_max": max(_known(steps, "kl"), default=None),
        "reward_std": _mean(_known(steps, "reward_std")),
        "num_tokens": sum(_known(steps, "num_tokens")),
        "seconds": sum(seconds_of(step) or 0.0 for step in steps),
    }


def curves(run: Path) -> list[dict[str, float]]:
    """Return the plotted metrics of every step; those of an evaluation belong to its step."""
    found = (merged(lines) for _, lines in sorted(by_step(run / METRICS).items()))
    return [
        {name: step[name] for name in ("step", *CURVES) if step.get(name) is not None}
        for step in found
    ]


def _score(found: "Evaluation") -> tuple[float | None, float | None]:
    if found.trained is None:
        return found.reward, found.reference_reward
    before = found.reference_accuracy
    return found.accuracy[found.trained], None if before is None else before[found.trained]


def _known(steps: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    values = (step.get(name) for step in steps)
    return [value for value in values if value is not None and math.isfinite(value)]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
