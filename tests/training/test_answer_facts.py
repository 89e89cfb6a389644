"""Records say whether completions that state the dataset's answer are paid more than others."""

import pytest

import klinic
from klinic.evidence import store

ROWS = [{"prompt": f"{number}=", "answer": number} for number in (2, 3, 5, 7)]


def by_type(completions, answer, **_):
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def by_text(completions, answer, **_):
    return [float(text == str(right)) for text, right in zip(completions, answer, strict=True)]


def by_length(completions, **_):
    return [float(len(text)) for text in completions]


@pytest.mark.parametrize(
    ("reward", "is_paid"), [(by_type, False), (by_text, True), (by_length, None)]
)
def test_answers_count_by_what_the_reward_pays_them(tmp_path, warm, reward, is_paid):
    klinic.train(
        "tiny",
        reward,
        train_dataset=ROWS,
        output_dir=tmp_path / "run",
        max_steps=1,
        prompts_per_step=4,
        group_size=64,
        max_completion_length=1,
        threads=1,
        **{"output.trackers": [], "output.doctor": "none"},
    )
    facts = store.read_record(tmp_path / "run", 1).facts
    if is_paid is None:  # a function that ignores the answer is not judged by it
        assert "answer_prompts" not in facts
        return
    assert facts["answer_prompts"] >= 1
    assert facts["answer_paid_more"] == (facts["answer_prompts"] if is_paid else 0)
    assert facts["answer_paid_less"] == 0
