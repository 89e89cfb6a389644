"""Formats and parses RookWorld's notation. Completions are untrusted text.

    policy        P: <FEN>                           M: <moves> E: <evaluations> B: <best move>
    environment   A: <FEN>+<move>+<last moves>+      <FEN>+<reward>+<ended>+<illegal>

Moves are UCI, evaluations are pawns for the side to move. The last moves include the move itself.
RookWorld models pad with spaces, so repeated spaces count as one.
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
MAX_PARSED_LENGTH = 1000  # characters parsed; an analysis has about a hundred
NUM_FIELDS = 4  # of an environment answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """A parsed analysis of a position, not checked for legality."""

    moves: tuple[str, ...]
    evaluations: tuple[str, ...]
    best: str

    @property
    def is_well_formed(self) -> bool:
        """Whether all moves and evaluations parse, and every move has an evaluation."""
        return (
            bool(self.moves)
            and len(self.moves) == len(self.evaluations)
            and all(map(MOVE.fullmatch, (*self.moves, self.best)))
            and all(map(EVALUATION.fullmatch, self.evaluations))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a move."""

    position: str
    reward: str
    ended: str
    illegal: str


def policy_prompt(position: str) -> str:
    """Format the prompt for the analysis of a position."""
    return f"P: {position}"


def policy_answer(moves: Sequence[str], evaluations: Sequence[str], best: str) -> str:
    """Format an analysis as a completion.

    >>> policy_answer(["e2e4", "d2d4"], ["0.3", "0.2"], "e2e4")
    ' M: e2e4 d2d4 E: 0.3 0.2 B: e2e4'
    """
    return f" M: {' '.join(moves)} E: {' '.join(evaluations)} B: {best}"


def environment_prompt(position: str, move: str, last_moves: Sequence[str]) -> str:
    """Format the prompt for the outcome of a move, which is the last of `last_moves`."""
    return f"A: {position}+{move}+{' '.join(last_moves)}+"


def environment_answer(outcome: Outcome) -> str:
    """Format an outcome as a completion."""
    return f"{outcome.position}+{outcome.reward}+{outcome.ended}+{outcome.illegal}"


def position_of(prompt: str) -> str:
    """Return the position in a prompt.

    >>> position_of("P: 8/8/8/8/8/8/8/K1k5 w - - 0 1")
    '8/8/8/8/8/8/8/K1k5 w - - 0 1'
    """
    return prompt[3:].partition("+")[0].strip()


def count_sections(completion: str) -> int:
    """Return the number of leading sections that occur once and in order.

    >>> count_sections(" M: e2e4 B: e2e4")
    1
    """
    words = completion[:MAX_PARSED_LENGTH].split()
    indices = [words.index(name) if words.count(name) == 1 else -1 for name in SECTIONS]
    num = 0
    while num < len(indices) and indices[num] > (indices[num - 1] if num else -1):
        num += 1
    return num


def read_analysis(completion: str) -> Analysis | None:
    """Parse an analysis; None if a section is missing, repeated or out of order.

    >>> read_analysis("  M: e2e4 d2d4   E: 0.3 0.2   B: e2e4").best
    'e2e4'
    """
    words = completion[:MAX_PARSED_LENGTH].split()
    if count_sections(completion) < len(SECTIONS) or words[0] != SECTIONS[0]:
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
    """Split an environment answer at `+`; a trailing `+` is allowed."""
    text = completion[:MAX_PARSED_LENGTH].strip()
    return [field.strip() for field in text.removesuffix("+").split("+")]


def read_outcome(completion: str) -> Outcome | None:
    """Parse an outcome; None unless it has four well-formed fields.

    >>> read_outcome("8/8/8/8/8/8/8/K1k5 w - - 0 1+0.001+0+0+").reward
    '0.001'
    """
    fields = read_fields(completion)
    if len(fields) != NUM_FIELDS or num_well_formed(fields) != NUM_FIELDS:
        return None
    position, reward, ended, illegal = fields
    return Outcome(position=position, reward=reward, ended=ended, illegal=illegal)


def num_well_formed(fields: Sequence[str]) -> int:
    """Return the number of well-formed fields."""
    flag = re.compile("[01]")
    forms = (POSITION, EVALUATION, flag, flag)
    return sum(
        form.fullmatch(field) is not None for form, field in zip(forms, fields, strict=False)
    )
