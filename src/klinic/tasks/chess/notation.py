"""Prompts and completions in RookWorld's notation. Everything a model wrote is hostile text.

    policy        P: <FEN>                           M: <moves> E: <evaluations> B: <best move>
    environment   A: <FEN>+<move>+<last moves>+      <FEN>+<reward>+<ended>+<illegal>

Moves are UCI, evaluations pawns for the side to move. The last moves contain the move itself.
Models of the family pad with spaces, so runs of them are read as one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

MOVE = re.compile(r"[a-h][1-8][a-h][1-8][qrbn]?")
EVALUATION = re.compile(r"-?[0-9]{1,3}(\.[0-9]{1,3})?")
POSITION = re.compile(
    r"[1-8pnbrqkPNBRQK/]{15,71} [wb] (-|[KQkq]{1,4}) (-|[a-h][36]) [0-9]{1,3} [0-9]{1,3}"
)
SECTIONS = ("M:", "E:", "B:")
LONGEST = 1000  # characters that are looked at; an analysis has about a hundred
FIELDS = 4  # of an answer of the environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """What a completion says of a position, whether or not it can be."""

    moves: tuple[str, ...]
    evaluations: tuple[str, ...]
    best: str

    @property
    def is_well_formed(self) -> bool:
        """Whether everything is written as it should be, and every move has its evaluation."""
        return (
            bool(self.moves)
            and len(self.moves) == len(self.evaluations)
            and all(map(MOVE.fullmatch, (*self.moves, self.best)))
            and all(map(EVALUATION.fullmatch, self.evaluations))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What follows from a move."""

    position: str
    reward: str
    ended: str
    illegal: str


def policy_prompt(position: str) -> str:
    """Return the question for an analysis of a position."""
    return f"P: {position}"


def policy_answer(moves: Sequence[str], evaluations: Sequence[str], best: str) -> str:
    """Return an analysis as a completion.

    >>> policy_answer(["e2e4", "d2d4"], ["0.3", "0.2"], "e2e4")
    ' M: e2e4 d2d4 E: 0.3 0.2 B: e2e4'
    """
    return f" M: {' '.join(moves)} E: {' '.join(evaluations)} B: {best}"


def environment_prompt(position: str, move: str, last_moves: Sequence[str]) -> str:
    """Return the question what follows from a move, which is the last of the last moves."""
    return f"A: {position}+{move}+{' '.join(last_moves)}+"


def environment_answer(outcome: Outcome) -> str:
    """Return an outcome as a completion."""
    return f"{outcome.position}+{outcome.reward}+{outcome.ended}+{outcome.illegal}"


def position_of(prompt: str) -> str:
    """Return the position that a prompt asks about.

    >>> position_of("P: 8/8/8/8/8/8/8/K1k5 w - - 0 1")
    '8/8/8/8/8/8/8/K1k5 w - - 0 1'
    """
    return prompt[3:].partition("+")[0].strip()


def found_sections(completion: str) -> int:
    """Return how many of the three sections stand there, each once and in their order.

    >>> found_sections(" M: e2e4 B: e2e4")
    1
    """
    words = completion[:LONGEST].split()
    places = [words.index(name) if words.count(name) == 1 else -1 for name in SECTIONS]
    num = 0
    while num < len(places) and places[num] > (places[num - 1] if num else -1):
        num += 1
    return num


def read_analysis(completion: str) -> Analysis | None:
    """Return the parts of an analysis, or None where a section is missing, double or out of place.

    >>> read_analysis("  M: e2e4 d2d4   E: 0.3 0.2   B: e2e4").best
    'e2e4'
    """
    words = completion[:LONGEST].split()
    if found_sections(completion) < len(SECTIONS) or words[0] != SECTIONS[0]:
        return None
    evaluations, best = words.index("E:"), words.index("B:")
    if len(words) != best + 2:
        return None
    return Analysis(
        moves=tuple(words[1:evaluations]),
        evaluations=tuple(words[evaluations + 1 : best]),
        best=words[-1],
    )


def read_fields(completion: str) -> list[str]:
    """Return what stands between the `+` of an environment's answer; one at the end is allowed."""
    text = completion[:LONGEST].strip()
    return [field.strip() for field in text.removesuffix("+").split("+")]


def read_outcome(completion: str) -> Outcome | None:
    """Return an outcome, or None where it has not its four fields or one is not well formed.

    >>> read_outcome("8/8/8/8/8/8/8/K1k5 w - - 0 1+0.001+0+0+").reward
    '0.001'
    """
    fields = read_fields(completion)
    if len(fields) != FIELDS or num_well_formed(fields) != FIELDS:
        return None
    position, reward, ended, illegal = fields
    return Outcome(position=position, reward=reward, ended=ended, illegal=illegal)


def num_well_formed(fields: Sequence[str]) -> int:
    """Return how many of the four fields are written as they should be."""
    flag = re.compile("[01]")
    forms = (POSITION, EVALUATION, flag, flag)
    return sum(
        form.fullmatch(field) is not None for form, field in zip(forms, fields, strict=False)
    )
