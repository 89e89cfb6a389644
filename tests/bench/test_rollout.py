"""Both sides of the bench make the same tokens, so their seconds can be compared."""

from dataclasses import replace

import pytest
from bench.rollout import GROUP, PROMPTS, SIZES, case_of, compared, klinic_side

from bench import rollout


@pytest.fixture
def case(monkeypatch):
    short = {"tiny": replace(SIZES["tiny"], longest=24)}
    monkeypatch.setattr(rollout, "SIZES", short)
    return case_of("tiny")


def test_greedy_tokens_are_those_of_generate_but_for_near_ties(case):
    told = compared(case)
    assert told["rows"] == PROMPTS * GROUP
    assert told["different"] == 0
    assert told["equal"] >= told["rows"] - 2


def test_completions_have_the_lengths_that_were_drawn(case):
    assert [len(ids) for ids in klinic_side(case)()] == case.lengths.tolist()
    assert 0.3 < case.share < 0.45
