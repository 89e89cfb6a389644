"""The header of a report: model, trainer, steps, duration, reward and KL from first to last."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from klinic.evidence.numbers import as_number
from klinic.report.curves import MetricCurves, Series

MAX_CHARS = 120  # characters of a value
TRAINERS = {"trl": "TRL", "klinic": "klinic", "verl": "verl"}
KL_METRICS = ("kl", "kl_exact/mean", "kl_k1/mean")

HeaderRow = tuple[str, str]


def run_header(
    facts: Mapping[str, Any], curves: MetricCurves, steps: Sequence[int]
) -> list[HeaderRow]:
    """Return labels and values of a run; what was not recorded is left out."""
    rows = [
        ("Model", _model_text(facts)),
        ("Trainer", _trainer_text(facts)),
        ("Steps", _steps_text(facts, curves, steps)),
        ("Time in steps", _duration_text(curves.seconds)),
        ("Reward", _change_text(curves.series("reward"))),
        ("KL, nats per token", _first_change(curves, KL_METRICS)),
        ("Device", _device_text(facts)),
    ]
    return [(label, value[:MAX_CHARS]) for label, value in rows if value]


def change_text(first: float, last: float) -> str:
    """Return a change from a first to a last value.

    >>> change_text(0.25, 0.34375), change_text(0.0, 1234567.0)
    ('0.25 → 0.344', '0 → 1.23e+06')
    """
    return f"{first:.3g} → {last:.3g}"


def _model_text(facts: Mapping[str, Any]) -> str:
    policy = _mapping(facts, "policy")
    name = policy.get("name")
    parts = [str(name)] if isinstance(name, str) else []
    num = as_number(policy.get("num_parameters"))
    if num is not None and math.isfinite(num) and num > 0:
        parts.append(f"{_short_number(num)} parameters")
    if isinstance(policy.get("dtype"), str):
        parts.append(str(policy["dtype"]))
    return ", ".join(parts)


def _short_number(number: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def _trainer_text(facts: Mapping[str, Any]) -> str:
    trainer = facts.get("trainer")
    if not isinstance(trainer, str):
        return ""
    release = _mapping(facts, "versions").get(trainer)
    name = TRAINERS.get(trainer, trainer)
    loss = _mapping(facts, "loss").get("name")
    parts = [f"{name} {release}" if isinstance(release, str) else name]
    return ", ".join(parts + ([f"loss {loss}"] if isinstance(loss, str) else []))


def _steps_text(facts: Mapping[str, Any], curves: MetricCurves, steps: Sequence[int]) -> str:
    last = max([curves.last_step, *steps[-1:]])
    planned = as_number(facts.get("max_steps"))
    if planned is not None and math.isfinite(planned) and planned >= last:
        return f"{last} of {planned:.0f}"
    return str(last) if last else ""


def _duration_text(seconds: float) -> str:
    if not 0 < seconds < 1e9:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def _first_change(curves: MetricCurves, names: Sequence[str]) -> str:
    texts = (_change_text(curves.series(name)) for name in names)
    return next((text for text in texts if text), "")


def _change_text(series: Series) -> str:
    finite = [value for value in series[1] if math.isfinite(value)]
    return change_text(finite[0], finite[-1]) if finite else ""


def _device_text(facts: Mapping[str, Any]) -> str:
    device = facts.get("device")
    if isinstance(device, str):
        return device
    versions = _mapping(facts, "versions")
    torch, cores = versions.get("torch"), versions.get("cpus")
    if isinstance(torch, str) and torch.endswith("+cpu"):
        return f"CPU, {cores} cores" if isinstance(cores, str) else "CPU"
    return f"torch {torch}" if isinstance(torch, str) else ""


def _mapping(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = facts.get(name)
    return value if isinstance(value, Mapping) else {}
