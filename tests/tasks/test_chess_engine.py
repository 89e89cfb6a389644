"""The real Stockfish: the same analysis every time, and games that follow from their seed."""

import chess
import pytest

from klinic.errors import ConfigError
from klinic.tasks.chess import games
from klinic.tasks.chess.engine import MATE_PAWNS, VARIABLE, run_stockfish
from klinic.tasks.chess.games import GameSettings, load_positions, play_game

MATE_IN_ONE = "6k1/5ppp/8/8/8/8/5PPP/3R2K1 w - - 0 1"
FEW = GameSettings(games=2, plies=6, nodes=300)


@pytest.fixture(scope="module")
def engine():
    with run_stockfish() as running:
        yield running


def test_it_finds_the_mate(engine):
    best, *_ = engine.best_lines(chess.Board(MATE_IN_ONE), nodes=2000, num=3, game=object())
    assert (best.move, best.pawns) == ("d1d8", MATE_PAWNS)


def test_lines_are_legal_moves_best_first(engine):
    board = chess.Board()
    lines = engine.best_lines(board, nodes=1000, num=5, game=object())
    assert len({line.move for line in lines}) == 5
    assert {line.move for line in lines} <= {move.uci() for move in board.legal_moves}
    assert [line.pawns for line in lines] == sorted((line.pawns for line in lines), reverse=True)


def test_a_game_follows_from_its_seed_in_another_process_too(engine):
    first = list(play_game(engine, FEW, 0))
    with run_stockfish() as another:
        assert list(play_game(another, FEW, 0)) == first
    assert list(play_game(engine, FEW, 1)) != first
    assert list(play_game(engine, GameSettings(games=2, plies=6, nodes=300, seed=1), 0)) != first


def test_every_position_follows_from_the_one_before(engine):
    board = chess.Board()
    for one in play_game(engine, FEW, 0):
        assert one.position == board.fen()
        assert [*one.history] == [move.uci() for move in board.move_stack]
        board.push_uci(one.played)


def test_games_are_played_once(tmp_path, monkeypatch):
    monkeypatch.setenv("KLINIC_CACHE", str(tmp_path))
    load_positions.cache_clear()
    first = load_positions(FEW)
    load_positions.cache_clear()
    monkeypatch.setattr(games, "play_game", None)  # would fail if it were called
    assert load_positions(FEW) == first
    assert len(first) == 2 * 6


def test_a_game_that_was_cut_short_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("KLINIC_CACHE", str(tmp_path))
    load_positions.cache_clear()

    def broken(*_):
        yield from ()
        raise KeyboardInterrupt

    monkeypatch.setattr(games, "play_game", broken)
    with pytest.raises(KeyboardInterrupt):
        load_positions(FEW)
    assert not list(tmp_path.rglob("*.jsonl"))


def test_an_engine_that_is_missing_is_said_with_what_to_install(monkeypatch):
    monkeypatch.setenv(VARIABLE, "/no/such/engine")
    with (
        pytest.raises(ConfigError, match=r"KLINIC_STOCKFISH is /no/such/engine.*apt-get install"),
        run_stockfish(),
    ):
        pass
