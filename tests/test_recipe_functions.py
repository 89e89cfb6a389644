"""The functions beside the recipes: rows that become chats, and what answers are worth."""

import importlib.util
import json
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[1] / "recipes"


def module(path):
    spec = importlib.util.spec_from_file_location(path.stem, RECIPES / path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def turns(*texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_gsm8k_rows_are_chats_with_a_number():
    row = module(Path("gsm8k.py")).row({"question": "2+2?", "answer": "add them\n#### 1,004"})
    assert row["answer"] == "1,004"
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]


@pytest.mark.filterwarnings("ignore")
def test_gsm8k_answers_are_compared_as_numbers():
    pytest.importorskip("math_verify")
    gsm8k = module(Path("gsm8k.py"))
    said = turns(r"so \boxed{1004}", "it is 1,004.", r"\boxed{12}", "no idea", r"\boxed{\frac12}")
    assert gsm8k.correct(said, answer=["1,004", "1,004", "13", "5", "0.5"]) == [1, 1, 0, 0, 1]
    assert gsm8k.boxed(said) == [1, 0, 1, 0, 1]


def test_musique_knows_aliases_and_wants_the_marks():
    musique = module(Path("musique.py"))
    paragraphs = [{"title": "Lima", "paragraph_text": "A city."}]
    row = {"question": "?", "paragraphs": paragraphs, "answer": "Peru", "answer_aliases": ["the P"]}
    known = musique.row(row)["answers"]
    assert known == ["Peru", "the P"]
    assert musique.row({**row, "answerable": False}) is None
    said = turns("<answer>peru</answer>", "<answer>P</answer>", "Peru", "<answer>in Peru</answer>")
    assert musique.exact(said, answers=[known] * 4) == [1, 1, 0, 0]
    assert musique.f1(said, answers=[known] * 4) == [1, 1, 0, pytest.approx(2 / 3)]


def test_the_reading_rows_are_those_that_the_script_makes(tmp_path):
    module(Path("reading/rows.py")).main(tmp_path)
    for name in ("train", "held_out", "capitals"):
        kept = (RECIPES / "reading" / f"{name}.jsonl").read_text()
        assert (tmp_path / f"{name}.jsonl").read_text() == kept


def test_held_out_reading_rows_share_no_word_that_matters_with_training():
    def answers(name):
        lines = (RECIPES / "reading" / f"{name}.jsonl").read_text().splitlines()
        return {json.loads(line)["answer"] for line in lines}

    assert not answers("train") & answers("held_out")


def test_reading_rewards_tell_answers_apart():
    rewards = module(Path("reading/rewards.py"))
    said = turns("lawyer", "Igor is a lawyer.", "Igor is a pilot and a lawyer.", "a pilot")
    given = {"answer": ["lawyer"] * 4, "others": [["pilot", "dog"]] * 4}
    assert rewards.exact(said, **given) == [1, 0, 0, 0]
    assert rewards.right(said, **given) == [1, 1, 0, 0]
    assert rewards.mentions(said, **given) == [1, 1, 1, 0]
    assert rewards.f1(said, **given) == [1, 0.5, pytest.approx(1 / 3), 0]
