"""The three gaps, by hand: which is open, where, and who owns the KL."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made import masked, record

from klinic.report.logp_gaps import (
    compute_lanes,
    kl_by_position,
    kl_profile,
    logp_gap,
    subsample_steps,
    token_k3,
    token_positions,
)
from klinic.report.token_heatmap import (
    MAX_TOKENS,
    NUM_COMPLETIONS,
    colour_limit,
    heatmap_step,
    token_text,
)


def test_each_lane_is_the_gap_that_it_says():
    made = record(apart=0.25, moved=-0.5)
    assert logp_gap(made, "update") == pytest.approx(np.zeros(12))
    assert logp_gap(made, "sampler") == pytest.approx(np.full(12, 0.25), abs=1e-6)
    assert logp_gap(made, "reference") == pytest.approx(np.full(12, -0.5), abs=1e-6)


def test_a_token_that_is_not_trained_on_has_no_gap():
    made = masked(record(moved=1.0), [0, 5])
    assert np.isnan(logp_gap(made, "reference")[[0, 5]]).all()
    assert np.isnan(token_k3(made)).sum() == 2


def test_lanes_lie_over_steps_and_positions():
    made = [record(step, lengths=(2, 4), apart=step / 10) for step in (1, 2, 3)]
    update, sampler, reference = compute_lanes(made)
    assert (update.name, sampler.name, reference.name) == ("update", "sampler", "reference")
    assert sampler.steps == [1, 2, 3]
    assert sampler.sizes.shape == (3, 4)
    assert sampler.sizes[1] == pytest.approx(np.full(4, 0.2), abs=1e-6)


def test_what_was_not_recorded_has_no_lane():
    from dataclasses import replace

    made = [replace(record(), logp_sampler=None, logp_ref=None)]
    assert [lane.name for lane in compute_lanes(made)] == ["update"]
    assert [kl_profile(one) for one in made] == [None] * len(made)
    assert kl_by_position([]) == {}


@given(st.lists(st.integers(0, 7), min_size=1, max_size=6))
def test_positions_begin_anew_with_every_completion(lengths):
    expected = [place for length in lengths for place in range(length)]
    assert token_positions(record(lengths=tuple(lengths))).tolist() == expected


def test_the_kl_by_position_is_k3():
    found = kl_by_position([kl_profile(record(step, moved=0.5)) for step in range(1, 9)])
    assert list(found) == ["first steps, 1 to 2", "last steps, 7 to 8"]
    for values in found.values():
        assert values == pytest.approx([np.exp(-0.5) - 1 + 0.5] * 5, rel=1e-5)


@given(st.integers(1, 400), st.integers(2, 50), st.lists(st.integers(1, 400), max_size=3))
def test_thinning_keeps_both_ends_and_what_matters(num, most, keep):
    steps = list(range(1, num + 1))
    found = subsample_steps(steps, most, keep)
    assert found[0] == 1
    assert found[-1] == num
    assert len(found) <= most + len(keep)
    assert set(keep) & set(steps) <= set(found)


def test_few_tokens_that_own_the_kl_are_named():
    made = record(lengths=(10, 10), moved=0.01)
    far = made.logp_ref.copy()
    far[13] = made.logp_old[13] - 6.0
    from dataclasses import replace

    step = heatmap_step(replace(made, logp_ref=far), {})
    assert step.num_owners == 1
    (owner,) = step.owners
    assert (owner.row, owner.position) == (1, 3)
    assert owner.share > 0.9


def test_nobody_owns_a_kl_that_is_zero():
    step = heatmap_step(record(moved=0.0), {})
    assert (step.owners, step.num_owners) == ([], 0)
    assert colour_limit([step]) == 0.1


def test_completions_of_different_prompts_are_shown_and_long_ones_are_cut():
    step = heatmap_step(record(lengths=(MAX_TOKENS + 7, 3, 3, 3, 3, 3)), {})
    assert len(step.completions) == NUM_COMPLETIONS
    assert step.completions[0].num_hidden == 7
    assert len(step.completions[0].tokens) == MAX_TOKENS


def test_a_token_of_a_megabyte_is_cut():
    assert len(token_text(1, {1: "x" * 10**6})) == 24
