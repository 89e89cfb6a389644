"""Rows of the chess task. A held-out position is held out of both skills and all games."""

from collections.abc import Iterator
from functools import cache
from itertools import islice
from random import Random

import chess

from klinic.tasks.base import Row, look_up
from klinic.tasks.chess import games
from klinic.tasks.chess.games import AnalysedPosition, load_positions
from klinic.tasks.chess.notation import (
    Outcome,
    environment_answer,
    environment_prompt,
    policy_answer,
    policy_prompt,
)
from klinic.tasks.held_out import digest_fraction, first_rows, is_held_out

LAST_MOVES = 10  # moves in an environment prompt, including the current one
MIX = ("policy", "policy", "policy", "environment")  # skills of consecutive warm-start rows
ILLEGAL_RATE = 0.1  # fraction of environment prompts with an illegal move
ORDINARY, WON, DRAWN, REFUSED = "0.001", "1.0", "0.5", "-1.0"


def train_rows(skill: str) -> list[Row]:
    """Return the training rows of a skill in a fixed shuffled order."""
    return [dict(row) for row in _split_rows(skill)[0]]


def eval_rows(skill: str, num: int) -> list[Row]:
    """Return the first `num` held-out rows of a skill; deterministic."""
    return [dict(row) for row in first_rows(_split_rows(skill)[1], num, skill)]


def warm_start_rows(seed: int) -> Iterator[Row]:
    """Yield prompts with the engine's answers: three of the policy, one of the environment."""
    random = Random(seed)  # noqa: S311 - samples rows, not secrets
    rows = {skill: _split_rows(skill)[0] for skill in ROW_MAKERS}
    while True:
        for skill in MIX:
            (row,) = random.choices(rows[skill])
            yield {"prompt": row["prompt"], "completion": row["answer"]}


@cache
def _split_rows(skill: str) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    make = look_up("skill of chess", skill, ROW_MAKERS)
    train: dict[str, Row] = {}
    held_out: dict[str, Row] = {}
    for one in load_positions(games.DEFAULT):
        row = {**make(one), "skill": skill}
        # without the move counters
        position_key = " ".join(one.position.split()[:4])
        (held_out if is_held_out(position_key) else train).setdefault(row["prompt"], row)
    return _sort_by_digest(train), _sort_by_digest(held_out)


def _sort_by_digest(rows: dict[str, Row]) -> tuple[Row, ...]:
    return tuple(rows[prompt] for prompt in sorted(rows, key=digest_fraction))


def _policy_row(one: AnalysedPosition) -> Row:
    moves = [line.move for line in one.lines]
    evaluations = [f"{line.pawns:.1f}" for line in one.lines]
    return {
        "prompt": policy_prompt(one.position),
        "answer": policy_answer(moves, evaluations, moves[0]),
    }


def _environment_row(one: AnalysedPosition) -> Row:
    board = chess.Board(one.position)
    move = one.played
    if digest_fraction(f"{one.position} {move}") < ILLEGAL_RATE:
        move = _illegal_move(board, move)
    last = (*one.history, move)[-LAST_MOVES:]
    return {
        "prompt": environment_prompt(one.position, move, last),
        "answer": environment_answer(move_outcome(one.position, move)),
    }


def move_outcome(position: str, move: str) -> Outcome:
    """Return the outcome of a move; an illegal move leaves the position unchanged.

    >>> move_outcome(chess.STARTING_FEN, "e2e4").position
    'rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1'
    >>> move_outcome(chess.STARTING_FEN, "e2e5").illegal
    '1'
    """
    board = chess.Board(position)
    if chess.Move.from_uci(move) not in board.legal_moves:
        return Outcome(position=position, reward=REFUSED, ended="0", illegal="1")
    board.push_uci(move)
    ended = board.is_game_over()
    reward = ORDINARY if not ended else WON if board.is_checkmate() else DRAWN
    return Outcome(position=board.fen(), reward=reward, ended=str(int(ended)), illegal="0")


def _illegal_move(board: chess.Board, move: str) -> str:
    """Return an illegal move of the same piece."""
    legal = {m.uci()[:4] for m in board.legal_moves}
    squares = (move[:2] + chess.square_name(s) for s in range(64))
    wrong = [m for m in squares if m not in legal and m[:2] != m[2:]]
    return next(islice(wrong, int(digest_fraction(board.fen()) * len(wrong)), None))


ROW_MAKERS = {"policy": _policy_row, "environment": _environment_row}
