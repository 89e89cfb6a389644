"""Stockfish, limited by nodes: the same position gets the same answer on every machine.

A limit by time would give another analysis whenever the machine is busy.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import chess
import chess.engine

from klinic.errors import ConfigError

VARIABLE = "KLINIC_STOCKFISH"
HOMES = ("stockfish", "/usr/games/stockfish")  # where Debian puts games is on no root's PATH
MATE = 100.0  # pawns that a forced mate is written as


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A move with what the engine thinks of it."""

    move: str
    pawns: float
    """For the side to move; 100 is mate."""


class Stockfish:
    """A running engine."""

    def __init__(self, process: chess.engine.SimpleEngine) -> None:
        self._process = process
        self.name = str(process.id["name"])

    def lines(self, board: chess.Board, *, nodes: int, num: int, game: object) -> list[Line]:
        """Return the best moves, best first; what it remembers is forgotten with every new game."""
        found = self._process.analyse(
            board, chess.engine.Limit(nodes=nodes), multipv=num, game=game
        )
        lines = [
            Line(move=info["pv"][0].uci(), pawns=_pawns(info["score"]))
            for info in found
            if info.get("pv")
        ]
        # nodes may run out between two lines, of which the first is then an older thought
        return sorted(lines, key=lambda line: -line.pawns)


@contextmanager
def stockfish() -> Iterator[Stockfish]:
    """Start the engine on one thread, and end it."""
    process = chess.engine.SimpleEngine.popen_uci(_binary())
    try:
        process.configure({"Threads": 1, "Hash": 16})
        yield Stockfish(process)
    finally:
        process.quit()


def _binary() -> str:
    given = os.environ.get(VARIABLE)
    for name in HOMES if given is None else (given,):
        path = shutil.which(name)
        if path is not None:
            return path
    where = f"{VARIABLE} is {given}, which is no program" if given else "it is not on the PATH"
    raise ConfigError(
        f"the task chess needs Stockfish, and {where}. Install it (on Debian: apt-get install "
        f"stockfish), or set {VARIABLE} to its path."
    )


def _pawns(score: chess.engine.PovScore) -> float:
    mate = score.relative.mate()
    if mate is not None:
        return MATE if mate > 0 else -MATE
    centipawns = score.relative.score()
    assert centipawns is not None  # noqa: S101 - a score is a mate or a number
    return max(-MATE, min(MATE, centipawns / 100))
