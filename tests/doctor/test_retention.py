"""Retention: how far it must fall, of how many prompts, to be a sign."""

import math

import pytest

from klinic.doctor.warning_signs import FORGETTING, EvalSetup, WarningState, watch_retention

START = {"eval/accuracy/add": 0.5, "eval/accuracy/copy": 1.0, "eval/retention": 1.0}
EXAM = EvalSetup(num=200, trained="add")


def forgot(copy, exam=EXAM, state=None):
    now = {"eval/accuracy/add": 0.9, "eval/accuracy/copy": copy, "eval/retention": copy}
    return watch_retention(state or WarningState(), now, START, exam)


def test_retention_must_fall_by_more_than_a_twentieth_and_by_more_than_chance():
    assert forgot(0.945).new != []
    assert forgot(0.955).new == []
    assert forgot(0.8, EvalSetup(num=10, trained="add")).new == []
    assert forgot(0.0, EvalSetup(num=10, trained="add")).new != []


def test_retention_is_told_once_until_it_is_back():
    first = forgot(0.5)
    (sign,) = first.new
    assert sign.name == FORGETTING
    assert sign.facts["figure"] == 0.5
    again = forgot(0.4, state=first.signs)
    assert again.new == []
    assert len(forgot(0.5, state=forgot(1.0, state=again.signs).signs).new) == 1


def test_the_error_of_retention_is_that_of_two_proportions():
    share = (200 * 0.5 + 1) / 202, 201 / 202
    error = math.sqrt(sum(q * (1 - q) / 202 for q in share))
    assert forgot(0.5).new[0].facts["error"] == pytest.approx(error)


def test_rewards_of_retention_rows_count_where_they_are_shares():
    now = {"eval/retention_reward": 0.4, "eval/retention": 0.5}
    exam = EvalSetup(num=200)
    assert watch_retention(WarningState(), now, {"eval/retention_reward": 0.8}, exam).new != []
    scores = {"eval/retention_reward": 4.0, "eval/retention": 0.5}
    assert watch_retention(WarningState(), scores, {"eval/retention_reward": 8.0}, exam).new == []
    assert watch_retention(WarningState(), {}, {}, exam).new == []
