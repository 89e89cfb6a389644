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

from klinic.evidence.writing import write_atomically
from klinic.runtime.cache import cache_folder
from klinic.tasks.chess.engine import EngineLine, Stockfish, run_stockfish

FORMAT = 1  # of the cache; increment when this file changes the games
NUM_LINES = 5
RANDOM_MOVE_RATE = 0.15  # fraction of moves sampled from all legal ones


@dataclass(frozen=True, slots=True, kw_only=True)
class GameSettings:
    """Number of games and their settings."""

    games: int = 400
    plies: int = 24
    """Maximum half-moves per game."""
    nodes: int = 2000
    """Node limit of each analysis."""
    seed: int = 0


DEFAULT = GameSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysedPosition:
    """A position of a game, the engine's lines, and the move played."""

    position: str
    lines: tuple[EngineLine, ...]
    """At most five, best first."""
    history: tuple[str, ...]
    """Moves of the game so far."""
    played: str


@cache
def load_positions(play: GameSettings) -> tuple[AnalysedPosition, ...]:
    """Return the positions of all games, from the cache if possible."""
    with run_stockfish() as engine:
        path = cache_folder("chess") / f"{_cache_key(play, engine.name)}.jsonl"
        if not path.is_file():
            _write_positions(
                path, (a for game in _track_games(play) for a in play_game(engine, play, game))
            )
    return tuple(_read_positions(path))


def play_game(engine: Stockfish, play: GameSettings, game: int) -> Iterator[AnalysedPosition]:
    """Play one game and yield its positions."""
    random = Random(f"{play.seed} {game}")  # noqa: S311 - samples moves, not secrets
    board, token = chess.Board(), object()
    history: list[str] = []
    while len(history) < play.plies and not board.is_game_over():
        lines = engine.best_lines(board, nodes=play.nodes, num=NUM_LINES, game=token)
        move = _sample_move(random, board, lines)
        yield AnalysedPosition(
            position=board.fen(), lines=tuple(lines), history=tuple(history), played=move
        )
        board.push_uci(move)
        history.append(move)


def _track_games(play: GameSettings) -> Iterable[int]:
    """Return the game numbers with a progress bar."""
    console = Console(stderr=True)
    return track(range(play.games), "Stockfish plays", console=console, transient=True)


def _sample_move(random: Random, board: chess.Board, lines: Sequence[EngineLine]) -> str:
    if random.random() < RANDOM_MOVE_RATE:
        return random.choice(sorted(move.uci() for move in board.legal_moves))
    weights = [2.0**-rank for rank in range(len(lines))]
    return random.choices([line.move for line in lines], weights)[0]


def _cache_key(play: GameSettings, engine: str) -> str:
    what = {"format": FORMAT, "engine": engine, **asdict(play)}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]


def _write_positions(path: Path, positions: Iterator[AnalysedPosition]) -> None:
    # a concurrent process writes identical content
    write_atomically(path, "".join(json.dumps(asdict(one)) + "\n" for one in positions).encode())


def _read_positions(path: Path) -> Iterator[AnalysedPosition]:
    for text in path.read_text().splitlines():
        entry = json.loads(text)
        yield AnalysedPosition(
            position=entry["position"],
            lines=tuple(EngineLine(**line) for line in entry["lines"]),
            history=tuple(entry["history"]),
            played=entry["played"],
        )
