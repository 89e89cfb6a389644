"""Rows of the chess task. A held-out position is held out of both skills and all games."""

from collections.abc import Iterator
from functools import cache
from itertools import islice
from random import Random

import chess

from klinic.tasks.base import Row, choose
from klinic.tasks.chess import games
from klinic.tasks.chess.games import Analysed, analysed
from klinic.tasks.chess.notation import (
    Outcome,
    environment_answer,
    environment_prompt,
    policy_answer,
    policy_prompt,
)
from klinic.tasks.held_out import first, fraction, is_held_out

LAST_MOVES = 10  # moves in an environment prompt, including the current one
MIX = ("policy", "policy", "policy", "environment")  # skills of consecutive warm-start rows
ILLEGAL = 0.1  # fraction of environment prompts with an illegal move
ORDINARY, WON, DRAWN, REFUSED = "0.001", "1.0", "0.5", "-1.0"


def train_rows(skill: str) -> list[Row]:
    """Return the training rows of a skill in a fixed shuffled order."""
    return [dict(row) for row in _split(skill)[0]]


def eval_rows(skill: str, num: int) -> list[Row]:
    """Return the first `num` held-out rows of a skill; deterministic."""
    return [dict(row) for row in first(_split(skill)[1], num, skill)]


def warm_start_rows(seed: int) -> Iterator[Row]:
    """Yield prompts with the engine's answers: three of the policy, one of the environment."""
    random = Random(seed)  # noqa: S311 - samples rows, not secrets
    rows = {skill: _split(skill)[0] for skill in MAKERS}
    while True:
        for skill in MIX:
            (row,) = random.choices(rows[skill])
            yield {"prompt": row["prompt"], "completion": row["answer"]}


@cache
def _split(skill: str) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    make = choose("skill of chess", skill, MAKERS)
    train: dict[str, Row] = {}
    held_out: dict[str, Row] = {}
    for one in analysed(games.DEFAULT):
        row = {**make(one), "skill": skill}
        # without the move counters
        place = " ".join(one.position.split()[:4])
        (held_out if is_held_out(place) else train).setdefault(row["prompt"], row)
    return _mixed(train), _mixed(held_out)


def _mixed(rows: dict[str, Row]) -> tuple[Row, ...]:
    return tuple(rows[prompt] for prompt in sorted(rows, key=fraction))


def _policy(one: Analysed) -> Row:
    moves = [line.move for line in one.lines]
    evaluations = [f"{line.pawns:.1f}" for line in one.lines]
    return {
        "prompt": policy_prompt(one.position),
        "answer": policy_answer(moves, evaluations, moves[0]),
    }


def _environment(one: Analysed) -> Row:
    board = chess.Board(one.position)
    move = one.played
    if fraction(f"{one.position} {move}") < ILLEGAL:
        move = _impossible(board, move)
    last = (*one.history, move)[-LAST_MOVES:]
    return {
        "prompt": environment_prompt(one.position, move, last),
        "answer": environment_answer(outcome(one.position, move)),
    }


def outcome(position: str, move: str) -> Outcome:
    """Return the outcome of a move; an illegal move leaves the position unchanged.

    >>> outcome(chess.STARTING_FEN, "e2e4").position
    'rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1'
    >>> outcome(chess.STARTING_FEN, "e2e5").illegal
    '1'
    """
    board = chess.Board(position)
    if chess.Move.from_uci(move) not in board.legal_moves:
        return Outcome(position=position, reward=REFUSED, ended="0", illegal="1")
    board.push_uci(move)
    ended = board.is_game_over()
    reward = ORDINARY if not ended else WON if board.is_checkmate() else DRAWN
    return Outcome(position=board.fen(), reward=reward, ended=str(int(ended)), illegal="0")


def _impossible(board: chess.Board, move: str) -> str:
    """Return an illegal move of the same piece."""
    legal = {m.uci()[:4] for m in board.legal_moves}
    squares = (move[:2] + chess.square_name(s) for s in range(64))
    wrong = [m for m in squares if m not in legal and m[:2] != m[2:]]
    return next(islice(wrong, int(fraction(board.fen()) * len(wrong)), None))


MAKERS = {"policy": _policy, "environment": _environment}
