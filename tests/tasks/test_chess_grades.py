"""Each step from a text to a good move is told apart, with its score and its reason."""

import chess
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klinic.tasks.chess.notation import environment_prompt, policy_prompt
from klinic.tasks.chess.rewards import agreement, legal, legality, parsed, parses, structure
from klinic.tasks.chess.rows import move_outcome

START = chess.STARTING_FEN
ASKED = policy_prompt(START)
ENGINE = " M: e2e4 d2d4 g1f3 E: 0.4 0.3 0.2 B: e2e4"
MOVED = environment_prompt(START, "e2e4", ["e2e4"])
AFTER = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1+0.001+0+0"
EVERY = (structure, parses, legality, agreement, parsed, legal)


def scores(said, skill="policy"):
    prompt, answer = (ASKED, ENGINE) if skill == "policy" else (MOVED, AFTER)
    given_ = {"prompts": [prompt], "completions": [said], "answer": [answer], "skill": [skill]}
    return [round(reward(**given_)[0], 3) for reward in EVERY]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("infancy neoc Anth Booker", [-0.3, -0.3, -0.3, -0.3, 0, 0]),
        ("", [-0.3, -0.3, -0.3, -0.3, 0, 0]),
        (" M: e2e4", [0.2, -0.3, -0.3, -0.3, 0, 0]),
        (" M: e2e4 E: 0.3", [0.467, -0.3, -0.3, -0.3, 0, 0]),
        (" M: e2e4 E: 0.3 B: e2e4 and", [0.733, -0.3, -0.3, -0.3, 0, 0]),
        (" M: e2x4 E: 0.3 B: e2e4", [1.0, 0.52, -0.3, -0.3, 0, 0]),
        (" M: e2e4 d2d4 E: 0.3 B: e2e4", [1.0, 0.567, -0.3, -0.3, 0, 0]),
        (" M: e2e5 d2d4 E: 0.3 0.1 B: e2e5", [1.0, 1.0, 0.15, 0.0, 1, 0]),
        (" M: e2e5 d2d4 E: 0.3 0.1 B: d2d4", [1.0, 1.0, 0.7, 0.633, 1, 1]),
        (" M: a2a3 h2h3 E: 0.3 0.1 B: h2h3", [1.0, 1.0, 1.0, 0.2, 1, 1]),
        (" M: a2a3 g1f3 E: 0.3 0.1 B: g1f3", [1.0, 1.0, 1.0, 0.467, 1, 1]),
        (ENGINE, [1, 1, 1, 1, 1, 1]),
    ],
)
def test_an_analysis_is_worth_what_it_got_to(said, expected):
    assert scores(said) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("castle early", [-0.3, -0.3, -0.3, -0.3, 0, 0]),
        ("a+b", [0.5, -0.3, -0.3, -0.3, 0, 0]),
        ("a+0.001+0+0", [1.0, 0.625, -0.3, -0.3, 0, 0]),
        (f"{START}+0.001+0+0", [1.0, 1.0, 1.0, 0.633, 1, 1]),
        ("8/8/8/8/8/8/8/8 w - - 0 1+0.001+0+0", [1.0, 1.0, 0.15, 0.0, 1, 0]),
        ("8/8/8/8/8/8/8 w - - 0 1+0.001+0+0", [1.0, 0.625, -0.3, -0.3, 0, 0]),
        (f"{AFTER[:-4]}+1+0", [1.0, 1.0, 1.0, 0.744, 1, 1]),
        (AFTER, [1, 1, 1, 1, 1, 1]),
        (AFTER + "+", [1, 1, 1, 1, 1, 1]),
    ],
)
def test_an_outcome_is_worth_what_it_got_to(said, expected):
    assert scores(said, "environment") == expected


def test_every_grade_says_why():
    (said,) = agreement.explain(
        prompts=[ASKED],
        completions=[" M: d2d4 E: 0.1 B: d2d4"],
        answer=[ENGINE],
        skill=["policy"],
    )
    assert (said.level, said.reason) == ("listed", "d2d4 is the engine's move number 2")


@given(st.text(alphabet="MEBPA: +-.0123456789abcdefghKQkq/w\n", max_size=120), st.booleans())
def test_whatever_is_written_is_graded(text, is_policy):
    for value in scores(text, "policy" if is_policy else "environment"):
        assert -0.3 <= value <= 1.0


@pytest.mark.parametrize(
    ("position", "move", "reward", "ended", "illegal"),
    [
        (START, "e2e4", "0.001", "0", "0"),
        (START, "e2e5", "-1.0", "0", "1"),
        ("6k1/5ppp/8/8/8/8/5PPP/3R2K1 w - - 0 1", "d1d8", "1.0", "1", "0"),
        ("7k/8/5Q2/8/8/8/8/K7 w - - 0 1", "f6f7", "0.5", "1", "0"),  # stalemate
    ],
)
def test_the_rules_say_what_follows(position, move, reward, ended, illegal):
    found = move_outcome(position, move)
    assert (found.reward, found.ended, found.illegal) == (reward, ended, illegal)
    assert (found.position == position) == (illegal == "1")
