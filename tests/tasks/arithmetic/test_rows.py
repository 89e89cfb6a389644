"""The split is by a digest: the same everywhere, and it gives nothing away."""

import subprocess
import sys
from collections import Counter
from itertools import islice

import pytest

from klinic.tasks.arithmetic.rows import DROPPED_CARRY_RATE, eval_rows, train_rows, warm_start_rows
from klinic.tasks.arithmetic.skills import SKILLS
from klinic.tasks.held_out import HELD_OUT_FRACTION


def held_out(skill):
    """Return all held-out rows: those of the skill that are not trained on."""
    num = sum(1 for _ in SKILLS[skill].questions()) - len(train_rows(skill))
    return eval_rows(skill, num)


@pytest.mark.parametrize("skill", SKILLS)
def test_about_a_fifth_is_held_out(skill):
    num = len(held_out(skill))
    assert num / (num + len(train_rows(skill))) == pytest.approx(HELD_OUT_FRACTION, abs=0.015)


def test_a_sum_is_held_out_with_its_mirror_image():
    train = {row["prompt"] for row in train_rows("addition")}
    for row in held_out("addition"):
        a, b = row["prompt"].rstrip("=").split("+")
        assert f"{b}+{a}=" not in train


def test_a_comparison_is_held_out_with_its_mirror_image():
    train = {row["prompt"] for row in train_rows("comparing")}
    for row in held_out("comparing"):
        _, a, b = row["prompt"].rstrip("=").split(" ")
        assert f"compare {b} {a}=" not in train


def test_the_first_rows_are_not_all_small_sums():
    answers = [int(row["answer"]) for row in eval_rows("addition", 50)]
    assert min(answers) < 50
    assert max(answers) > 150


def test_other_processes_hold_out_the_same():
    code = "from klinic.tasks.arithmetic.rows import *; print(eval_rows('copying', 20))"
    others = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    assert others == [str(eval_rows("copying", 20))] * 2


def test_skills_are_mixed_by_their_weights():
    skill_of = {row["prompt"]: name for name in SKILLS for row in train_rows(name)}
    num = 20_000
    found = Counter(skill_of[row["prompt"]] for row in islice(warm_start_rows(3), num))
    whole = sum(skill.weight for skill in SKILLS.values())
    for name, skill in SKILLS.items():
        assert found[name] / num == pytest.approx(skill.weight / whole, abs=0.015)


def test_the_warm_start_is_right_but_for_forgotten_carries():
    answers = {row["prompt"]: row["answer"] for name in SKILLS for row in train_rows(name)}
    slips = {
        q.prompt: q.wrong_answer
        for q in SKILLS["addition"].questions()
        if q.wrong_answer is not None
    }
    carrying = []
    for row in islice(warm_start_rows(4), 20_000):
        prompt, completion = row["prompt"], row["completion"]
        if prompt in slips:
            assert completion in {answers[prompt], slips[prompt]}
            carrying.append(completion == slips[prompt])
        else:
            assert completion == answers[prompt]
    assert sum(carrying) / len(carrying) == pytest.approx(DROPPED_CARRY_RATE, abs=0.03)
