"""Runs Stockfish with a node limit, so that results do not depend on the machine.

A time limit would change the analysis whenever the machine is busy.
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
PROGRAM_NAMES = ("stockfish", "/usr/games/stockfish")  # Debian's games folder is not on root's PATH
MATE_PAWNS = 100.0  # evaluation of a forced mate, in pawns


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLine:
    """A move with the engine's evaluation."""

    move: str
    pawns: float
    """Evaluation for the side to move, in pawns; 100 is mate."""


class Stockfish:
    """A running Stockfish process."""

    def __init__(self, process: chess.engine.SimpleEngine) -> None:
        self._process = process
        self.name = str(process.id["name"])

    def best_lines(
        self, board: chess.Board, *, nodes: int, num: int, game: object
    ) -> list[EngineLine]:
        """Return the best moves, best first; a new `game` object clears the hash table."""
        infos = self._process.analyse(
            board, chess.engine.Limit(nodes=nodes), multipv=num, game=game
        )
        lines = [
            EngineLine(move=info["pv"][0].uci(), pawns=_pawns_of_score(info["score"]))
            for info in infos
            if info.get("pv")
        ]
        # the node limit may stop between lines, which then come from different depths
        return sorted(lines, key=lambda line: -line.pawns)


@contextmanager
def run_stockfish() -> Iterator[Stockfish]:
    """Run the engine on one thread; quit it at the end."""
    process = chess.engine.SimpleEngine.popen_uci(_find_binary())
    try:
        process.configure({"Threads": 1, "Hash": 16})
        yield Stockfish(process)
    finally:
        process.quit()


def _find_binary() -> str:
    configured = os.environ.get(VARIABLE)
    for name in PROGRAM_NAMES if configured is None else (configured,):
        path = shutil.which(name)
        if path is not None:
            return path
    where = (
        f"{VARIABLE} is {configured}, which is not a program"
        if configured
        else "it is not on the PATH"
    )
    raise ConfigError(
        f"the task chess needs Stockfish, but {where}. Install it (on Debian: apt-get install "
        f"stockfish), or set {VARIABLE} to its path."
    )


def _pawns_of_score(score: chess.engine.PovScore) -> float:
    mate = score.relative.mate()
    if mate is not None:
        return MATE_PAWNS if mate > 0 else -MATE_PAWNS
    centipawns = score.relative.score()
    assert centipawns is not None  # noqa: S101 - a score is a mate or centipawns
    return max(-MATE_PAWNS, min(MATE_PAWNS, centipawns / 100))
