"""verl's completions and their scores, as metrics."""

import json

import pytest
from foreign_logs import write_lines, write_rollouts

from klinic.errors import EvidenceError
from klinic.evidence.readers.find import read_log
from klinic.evidence.readers.verl_rollouts import rollout_metrics


def rows(*scores, texts=None):
    texts = texts or [str(n) for n in range(len(scores))]
    return [
        {"input": f"q{n // 2}", "output": text, "score": score}
        for n, (score, text) in enumerate(zip(scores, texts, strict=True))
    ]


def test_groups_are_those_of_one_input():
    found = rollout_metrics(rows(1.0, 1.0, 0.0, 1.0))
    assert found["reward"] == 0.75
    assert found["frac_reward_zero_std"] == 0.5
    assert found["reward_std"] == pytest.approx(0.4330127)
    assert found["completions/equal_ratio"] == 0.0
    assert rollout_metrics(rows(0.0, 1.0, texts=["a", "a"]))["completions/equal_ratio"] == 0.5


def test_a_folder_is_read_in_the_order_of_its_steps(tmp_path):
    log = read_log(write_rollouts(tmp_path / "dump", steps=12))
    assert (log.format, log.trainer.name) == ("Rollouts", "verl")
    assert log.steps == tuple(range(1, 13))
    assert log.has_metric("frac_reward_zero_std")


def test_one_file_is_enough(tmp_path):
    write_rollouts(tmp_path, steps=3)
    assert read_log(tmp_path / "2.jsonl").steps == (2,)


def test_the_name_of_the_file_says_the_step_where_the_line_does_not(tmp_path):
    write_lines(tmp_path / "17.jsonl", rows(1.0, 0.0))
    assert read_log(tmp_path).steps == (17,)


@pytest.mark.parametrize(
    "change", [{"score": "high"}, {"input": 3}, {"score": [1.0]}, {"step": [1]}]
)
def test_lines_that_are_no_rollouts_are_refused(tmp_path, change):
    lines = rows(1.0, 0.0)
    lines[1] = {**lines[1], **change}
    write_lines(tmp_path / "1.jsonl", lines)
    with pytest.raises(EvidenceError, match="line 2"):
        read_log(tmp_path)


def test_scores_beyond_all_numbers_are_no_overflow(tmp_path):
    lines = rows(1e308, 1e308, -1e308, 1e308)
    lines[0]["score"] = json.loads("1e999")
    write_lines(tmp_path / "1.jsonl", lines)
    assert len(read_log(tmp_path).steps) == 1
