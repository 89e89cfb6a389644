"""Games of the engine with itself, with its analysis of every position.

A game and its seed are one: moves are drawn among the engine's own lines, better ones more often,
and now and then among all legal moves, so that positions differ and mistakes occur in them. Games
take minutes, so they are kept in a cache.
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

FORMAT = 1  # raise it when this file plays otherwise
NUM_LINES = 5
ODD_MOVES = 0.15  # share of moves that are drawn among all legal ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """How many games are played, and how."""

    games: int = 400
    plies: int = 24
    """Half-moves of a game at most."""
    nodes: int = 2000
    """Positions that the engine looks at for each analysis."""
    seed: int = 0


DEFAULT = Play()


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysed:
    """A position of a game, what the engine thinks of it, and what was played."""

    position: str
    lines: tuple[Line, ...]
    """At most five, best first."""
    history: tuple[str, ...]
    """Moves of the game up to here."""
    played: str


@cache
def analysed(play: Play) -> tuple[Analysed, ...]:
    """Return the positions of all games, from the cache where they are."""
    with stockfish() as engine:
        path = cache_folder("chess") / f"{_key(play, engine.name)}.jsonl"
        if not path.is_file():
            _write(path, (a for game in _shown(play) for a in played(engine, play, game)))
    return tuple(_read(path))


def played(engine: Stockfish, play: Play, game: int) -> Iterator[Analysed]:
    """Play one game and yield its positions."""
    random = Random(f"{play.seed} {game}")  # noqa: S311 - draws moves, keeps no secrets
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
    """Return the numbers of the games, with a bar: they take minutes."""
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
    # another process that was first wrote the same
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
