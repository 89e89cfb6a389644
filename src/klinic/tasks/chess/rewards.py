"""Rewards of the chess task: four graduated rewards from format to best move, and two rates.

                structure   parses   legality   agreement
    malformed   -0.3        -0.3     -0.3       -0.3
    part        0.2-1.0     0.1-0.8
    illegal                          0.0-0.3    0.0
    legal                            0.5-0.9    0.2
    listed                                      0.3-0.8    one of the engine's other moves
    whole       1.0         1.0      1.0        1.0

`parsed` and `legal` are 1 or 0: with weight 0 their means are monitored rates.
"""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from klinic.rewards.levels import Grade, Levels, graduated
from klinic.tasks.base import look_up
from klinic.tasks.chess import environment, policy
from klinic.tasks.chess.notation import environment_answer, read_outcome

SKILLS: dict[str, ModuleType] = {"policy": policy, "environment": environment}


def _skill_module(skill: str) -> ModuleType:
    return look_up("skill of chess", skill, SKILLS)


@graduated(Levels(malformed=-0.3, part=(0.2, 1.0), whole=1.0))
def structure(completion: str, skill: str) -> Grade:
    """Grade the sections or fields of an answer."""
    grade: Grade = _skill_module(skill).structure(completion)
    return grade


@graduated(Levels(malformed=-0.3, part=(0.1, 0.8), whole=1.0))
def parses(completion: str, skill: str) -> Grade:
    """Grade the notation of the sections or fields."""
    grade: Grade = _skill_module(skill).parses(completion)
    return grade


@graduated(Levels(malformed=-0.3, illegal=(0.0, 0.3), legal=(0.5, 0.9), whole=1.0))
def legality(prompt: str, completion: str, skill: str) -> Grade:
    """Grade an answer by the rules of chess."""
    grade: Grade = _skill_module(skill).legality(prompt, completion)
    return grade


@graduated(Levels(malformed=-0.3, illegal=0.0, legal=0.2, listed=(0.3, 0.8), whole=1.0))
def agreement(prompt: str, completion: str, answer: str, skill: str) -> Grade:
    """Grade an answer against the engine's lines, or against the outcome of the move."""
    grade: Grade = _skill_module(skill).agreement(prompt, completion, answer)
    return grade


def parsed(
    prompts: Sequence[str],  # noqa: ARG001 - the signature of every reward function
    completions: Sequence[str],
    skill: Sequence[str],
    **columns: Any,  # noqa: ARG001
) -> list[float]:
    """Return 1 if an answer parses, else 0."""
    return [
        float(_skill_module(name).parses(completion).level == "whole")
        for completion, name in zip(completions, skill, strict=True)
    ]


def legal(
    prompts: Sequence[str],
    completions: Sequence[str],
    skill: Sequence[str],
    **columns: Any,  # noqa: ARG001
) -> list[float]:
    """Return 1 if the best move, or the position, is legal, else 0."""
    rows = zip(prompts, completions, skill, strict=True)
    return [
        float(_skill_module(name).is_legal(prompt, completion)) for prompt, completion, name in rows
    ]


def parse(row: Mapping[str, str], completion: str) -> str | None:
    """Return the best move or the outcome in a completion; None if it does not parse."""
    if row["skill"] == "policy":
        return policy.best_move(completion)
    outcome = read_outcome(completion)
    return None if outcome is None else environment_answer(outcome)
