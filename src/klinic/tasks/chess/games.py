"""Self-play games of the engine, with its analysis of every position.

A game is deterministic given its seed. Moves are sampled from the engine's lines, better ones more
often, and sometimes from all legal moves, so that positions vary and contain mistakes. Games take
minutes, so they are cached.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from random import Random

import chess
from rich.console import Console
from rich.progress import track

from klinic.cache import cache_folder
from klinic.evidence.writing import write_atomically
from klinic.tasks.chess.engine import Line, Stockfish, stockfish

FORMAT = 1  # of the cache; increment when this file changes the games
NUM_LINES = 5
ODD_MOVES = 0.15  # fraction of moves sampled from all legal ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """Number of games and their settings."""

    games: int = 400
    plies: int = 24
    """Maximum half-moves per game."""
    nodes: int = 2000
    """Node limit of each analysis."""
    seed: int = 0


DEFAULT = Play()


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysed:
    """A position of a game, the engine's lines, and the move played."""

    position: str
    lines: tuple[Line, ...]
    """At most five, best first."""
    history: tuple[str, ...]
    """Moves of the game so far."""
    played: str


@cache
def analysed(play: Play) -> tuple[Analysed, ...]:
    """Return the positions of all games, from the cache if possible."""
    with stockfish() as engine:
        path = cache_folder("chess") / f"{_key(play, engine.name)}.jsonl"
        if not path.is_file():
            _write(path, (a for game in _shown(play) for a in played(engine, play, game)))
    return tuple(_read(path))


def played(engine: Stockfish, play: Play, game: int) -> Iterator[Analysed]:
    """Play one game and yield its positions."""
    random = Random(f"{play.seed} {game}")  # noqa: S311 - samples moves, not secrets
    board, token = chess.Board(), object()
    history: list[str] = []
    while len(history) < play.plies and not board.is_game_over():
        lines = engine.lines(board, nodes=play.nodes, num=NUM_LINES, game=token)
        move = _drawn(random, board, lines)
        yield Analysed(
            position=board.fen(), lines=tuple(lines), history=tuple(history), played=move
        )
        board.push_uci(move)
        history.append(move)


def _shown(play: Play) -> Iterable[int]:
    """Return the game numbers with a progress bar."""
    console = Console(stderr=True)
    return track(range(play.games), "Stockfish plays", console=console, transient=True)


def _drawn(random: Random, board: chess.Board, lines: Sequence[Line]) -> str:
    if random.random() < ODD_MOVES:
        return random.choice(sorted(move.uci() for move in board.legal_moves))
    weights = [2.0**-rank for rank in range(len(lines))]
    return random.choices([line.move for line in lines], weights)[0]


def _key(play: Play, engine: str) -> str:
    what = {"format": FORMAT, "engine": engine, **asdict(play)}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]


def _write(path: Path, positions: Iterator[Analysed]) -> None:
    # a concurrent process writes identical content
    write_atomically(path, "".join(json.dumps(asdict(one)) + "\n" for one in positions).encode())


def _read(path: Path) -> Iterator[Analysed]:
    for text in path.read_text().splitlines():
        found = json.loads(text)
        yield Analysed(
            position=found["position"],
            lines=tuple(Line(**line) for line in found["lines"]),
            history=tuple(found["history"]),
            played=found["played"],
        )
