"""The model card of a saved model: training setup, KL to the reference, diagnosis.

The card is a README.md with metadata for model hubs. It contains nothing that differs between two
runs of the same recipe, such as dates or durations, so that exports stay bit-identical.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from klinic import __version__
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.recipe.recipe import Recipe
from klinic.runtime.terminal_text import escape_for_terminal

CARD_NAME = "README.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """Facts about a run at the time its model is saved."""

    recipe: Recipe
    step: int
    kl_coef: float | None
    """Value after this step; None without a KL."""
    reference: Mapping[str, Any]
    """Kind, source and digest."""
    teacher: Mapping[str, Any]
    """The same of the teacher."""
    metrics: Mapping[str, float]
    """Metrics and held-out evaluation of this step; empty if the model is not from a step."""
    causes: Sequence[tuple[int, str]] | None
    """Step and name of each diagnosed cause; None if the doctor was disabled."""


def model_card(facts: CardFacts) -> str:
    """Return the model card as Markdown."""
    recipe = facts.recipe
    head = {
        "library_name": "transformers" if recipe.model.lora_rank is None else "peft",
        "tags": ["grpo", "klinic"],
    }
    rows = {
        "Trained with": f"GRPO ({recipe.learner.loss}), klinic {__version__}",
        "Start": inline_code(recipe.model.name),
        "Step": f"{facts.step} of {recipe.loop.max_steps}, seed {recipe.seed}",
        "KL term": _kl_text(facts),
        "Reference": _reference_text(facts.reference),
        "KL to it": _distance_text(facts.metrics),
        "Teacher": _teacher_text(facts),
        "KL to the teacher": _teacher_distance_text(facts.metrics),
        "Held out": _held_out_text(facts.metrics),
        "Diagnosis": _diagnosis_text(facts),
    }
    table = [f"| {name} | {escape_cell(value)} |" for name, value in rows.items() if value]
    front = yaml.safe_dump(head, sort_keys=False)
    return "\n".join(
        ["---", f"{front}---", "", "## Training", "", "| | |", "|---|---|", *table, ""]
    )


def escape_cell(text: str) -> str:
    r"""Return text escaped for a table cell.

    >>> escape_cell("KL(p || q)")
    'KL(p \\|\\| q)'
    """
    return text.replace("|", r"\|")


def inline_code(text: str) -> str:
    """Return untrusted text as inline code on one line."""
    return f"`{escape_for_terminal(text).replace('`', ' ')}`"


def _kl_text(facts: CardFacts) -> str:
    kl = facts.recipe.kl
    if kl is None or facts.kl_coef is None:
        return "none"
    moves = "" if kl.controller == "fixed" else f", steered by `{kl.controller}` to {kl.target}"
    means = ESTIMATORS[kl.estimator].sentence
    return f"`{kl.estimator}`, coefficient {facts.kl_coef:.6g}{moves}. {means}"


def _reference_text(reference: Mapping[str, Any]) -> str:
    if not reference.get("digest"):
        return ""
    kind = str(reference["kind"]).replace("_", " ")
    return f"{kind} of {inline_code(str(reference['source']))}, digest `{reference['digest']}`"


def _distance_text(metrics: Mapping[str, float]) -> str:
    if "kl" not in metrics:
        return ""
    return (
        f"{metrics['kl']:.4g} nats per token, {metrics['kl_k3/per_sequence']:.4g} per completion "
        "(k3, on the completions of this step)"
    )


def _teacher_text(facts: CardFacts) -> str:
    section = facts.recipe.teacher
    if section is None:
        return ""
    beside = "instead of the rewards" if section.alone else "beside the rewards"
    return (
        f"{inline_code(str(facts.teacher['source']))}, digest `{facts.teacher['digest']}`; KL by "
        f"`{section.estimator}`, coefficient {section.coef:.6g}, {beside}"
    )


def _teacher_distance_text(metrics: Mapping[str, float]) -> str:
    if "teacher/kl" not in metrics:
        return ""
    return f"{metrics['teacher/kl']:.4g} nats per token (k3, on the completions of this step)"


def _held_out_text(metrics: Mapping[str, float]) -> str:
    scores = {name.removeprefix("eval/"): v for name, v in metrics.items() if name[:5] == "eval/"}
    return ", ".join(f"{name} {value:.3f}" for name, value in scores.items())


def _diagnosis_text(facts: CardFacts) -> str:
    if facts.causes is None:
        return "disabled (`output.doctor: none`)"
    if not facts.causes:
        return "no cause was named up to this step"
    return ", ".join(f"{inline_code(cause)} in step {step}" for step, cause in facts.causes)
