"""What holds for every task: nothing held out is trained on, and rewards agree with answers."""

import sys
from importlib.util import find_spec
from itertools import islice

import pytest

from klinic.errors import ConfigError, MissingExtraError
from klinic.tasks.catalogue import EXTRAS, find_task

TASKS = {name: find_task(name) for name in EXTRAS if name != "chess" or find_spec("chess")}
EVERY_SKILL = [(task, skill) for task in TASKS.values() for skill in task.skills]
NUM = 100
OF_PROMPTS = {"context_kept"}  # rewards that say nothing of a completion

every_skill = pytest.mark.parametrize(
    ("task", "skill"), EVERY_SKILL, ids=[f"{task.name}-{skill}" for task, skill in EVERY_SKILL]
)
every_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


@every_task
def test_it_is_found_by_its_name(task):
    assert find_task(task.name) is task
    assert task.default_skill in task.skills
    assert task.default_reward in task.rewards


def test_a_name_that_is_nearly_right_is_guessed():
    with pytest.raises(ConfigError, match=r"no task 'arithmetics'. Did you mean arithmetic\?"):
        find_task("arithmetics")


def test_a_name_that_is_quite_wrong_is_answered_with_all_names():
    with pytest.raises(
        ConfigError, match=r"no task 'juggling'. There are: arithmetic, chess, multihop"
    ):
        find_task("juggling")


def test_a_task_whose_extra_is_missing_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("klinic.tasks.chess")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "chess", None)
    with pytest.raises(MissingExtraError, match=r'needs chess. .* pip install "klinic\[chess\]"'):
        find_task("chess")


@every_skill
def test_rows_have_the_same_columns(task, skill):
    rows = [*task.train_rows(skill)[:NUM], *task.eval_rows(skill, NUM)]
    (columns,) = {tuple(row) for row in rows}
    assert columns[:3] == ("prompt", "answer", "skill")
    assert {row["skill"] for row in rows} == {skill}


@every_skill
def test_no_held_out_prompt_is_trained_on(task, skill):
    train = [row["prompt"] for row in task.train_rows(skill)]
    held_out = [row["prompt"] for row in task.eval_rows(skill, NUM)]
    assert len(set(train)) == len(train)
    assert len(set(held_out)) == NUM
    assert not set(train) & set(held_out)


@every_task
def test_the_warm_start_is_made_of_the_rows_of_training(task):
    skills = {row["prompt"]: row["skill"] for s in task.skills for row in task.train_rows(s)}
    rows = list(islice(task.warm_start_rows(0), 2000))
    assert {skills[row["prompt"]] for row in rows} == set(task.skills)
    for row in rows:
        assert task.parse({"skill": skills[row["prompt"]]}, row["completion"]) is not None


@every_task
def test_the_seed_decides_the_warm_start(task):
    def first(seed):
        return list(islice(task.warm_start_rows(seed), 50))

    assert first(1) == first(1)
    assert first(1) != first(2)


@every_skill
def test_fewer_held_out_rows_are_the_first_of_more(task, skill):
    assert task.eval_rows(skill, 10) == task.eval_rows(skill, NUM)[:10]


@every_skill
def test_changing_a_row_changes_no_other_call(task, skill):
    before = task.eval_rows(skill, 1)
    task.eval_rows(skill, 1)[0]["answer"] = "spoilt"
    task.train_rows(skill)[0]["answer"] = "spoilt"
    assert task.eval_rows(skill, 1) == before
    assert task.train_rows(skill)[0]["answer"] != "spoilt"


@every_skill
def test_the_answer_is_correct_and_anything_else_is_not(task, skill):
    for row in task.eval_rows(skill, NUM):
        assert task.is_correct(row, row["answer"])
        assert not task.is_correct(row, row["answer"] + row["answer"])
        assert not task.is_correct(row, "")


@every_skill
def test_no_completion_is_worth_more_than_the_answer(task, skill):
    row = task.eval_rows(skill, 1)[0]
    completions = [row["answer"], row["answer"] * 2, "0", "", "nonsense"]
    columns = {name: [value] * len(completions) for name, value in row.items()}
    prompts = columns.pop("prompt")
    for name, reward in task.rewards.items():
        if name in OF_PROMPTS:
            continue
        best, *others = reward(prompts=prompts, completions=completions, **columns)
        assert best == 1.0
        assert all(value < 1.0 for value in others)


@every_task
def test_an_unknown_skill_is_refused(task):
    for call in (task.train_rows, lambda skill: task.eval_rows(skill, 1)):
        with pytest.raises(ConfigError, match="no skill of"):
            call("juggling")


@every_skill
def test_more_rows_than_are_held_out_are_refused_with_their_number(task, skill):
    with pytest.raises(ConfigError, match=r"Use 1 to \d+"):
        task.eval_rows(skill, 10**9)
    with pytest.raises(ConfigError, match="0 held-out rows"):
        task.eval_rows(skill, 0)
