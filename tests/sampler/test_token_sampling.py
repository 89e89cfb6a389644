"""Tokens are drawn from the distribution that is claimed, exactly."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from klinic.errors import PolicyError
from klinic.model.token_filters import filter_mask
from klinic.sampler import token_sampling
from klinic.sampler.random_streams import uniforms
from klinic.sampler.token_sampling import SamplingParams, inverse_cdf, sample_tokens

P = torch.tensor([0.5, 0.25, 0.0, 0.125, 0.0625, 0.0625], dtype=torch.float64)
GRID = (torch.arange(16, dtype=torch.float64) + 0.5) / 16


def counts(p, grid=GRID, how=None):
    logits = p.log().expand(len(grid), -1)
    return torch.bincount(
        sample_tokens(logits, grid, how or SamplingParams()).token_ids, minlength=len(p)
    )


def test_an_even_grid_of_uniforms_gives_every_outcome_its_exact_share():
    assert counts(P).tolist() == [8, 4, 0, 2, 1, 1]


def test_the_ends_of_the_unit_interval_give_outcomes_that_are_possible():
    p = torch.tensor([0.0, 0.3, 0.7, 0.0])
    ends = torch.tensor([0.0, float(np.nextafter(1, 0))], dtype=torch.float64)
    assert sample_tokens(p.log().expand(2, -1), ends, SamplingParams()).token_ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("how", "left"),
    [
        (SamplingParams(top_k=2), [0, 1]),
        (SamplingParams(top_p=0.75), [0, 1]),
        (SamplingParams(top_p=0.76), [0, 1, 3]),
        (SamplingParams(min_p=0.25), [0, 1, 3]),
        (SamplingParams(min_p=0.26), [0, 1]),
        # of the three that are left, 0.857 is two
        (
            SamplingParams(top_k=3, top_p=0.86),
            [0, 1, 3],
        ),
        (SamplingParams(top_k=3, top_p=0.85), [0, 1]),
        (SamplingParams(top_p=1e-9), [0]),
    ],
)
def test_filters_leave_what_they_say_and_the_rest_is_normalised(how, left):
    keep = filter_mask(P.log()[None], how)[0]
    assert keep.nonzero()[:, 0].tolist() == left
    drawn = sample_tokens(P.log().expand(len(GRID), -1), GRID, how)
    assert set(drawn.token_ids.tolist()) <= set(left)
    expected = (P / P[left].sum()).log()[drawn.token_ids]
    torch.testing.assert_close(drawn.logp, expected, rtol=0, atol=1e-12)


def test_temperature_is_applied_before_the_log_prob_is_taken():
    logits = torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.float64)
    drawn = sample_tokens(
        logits, torch.tensor([0.5], dtype=torch.float64), SamplingParams(temperature=0.5)
    )
    assert float(drawn.logp) == pytest.approx(float(torch.log_softmax(2 * logits, -1)[0, 1]))


def test_temperature_zero_takes_the_likeliest_and_says_what_it_was_worth():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    drawn = sample_tokens(
        logits, torch.tensor([0.99], dtype=torch.float64), SamplingParams(temperature=0.0)
    )
    assert drawn.token_ids.tolist() == [1]
    assert float(drawn.logp) == pytest.approx(float(torch.log_softmax(logits, -1)[0, 1]))


@settings(max_examples=60)
@given(
    st.lists(st.floats(-30, 30), min_size=2, max_size=9),
    st.floats(0, 1, exclude_max=True),
)
def test_the_outcome_is_where_the_cdf_crosses_the_number(logits, u):
    logp = torch.log_softmax(torch.tensor([logits], dtype=torch.float64), -1)
    got = int(inverse_cdf(logp, torch.tensor([u], dtype=torch.float64)))
    cdf = np.concatenate([[0.0], np.cumsum(np.exp(logp[0].numpy()))])
    assert cdf[got] - 1e-12 <= u * cdf[-1] <= cdf[got + 1] + 1e-12


def test_streams_depend_on_each_part_of_their_name_and_on_nothing_else():
    name = {"seed": 1, "step": 2, "prompt": 3, "sample": 4}
    one = uniforms(**name, num=8)
    assert np.array_equal(one, uniforms(**name, num=8))
    assert np.array_equal(one[3:], uniforms(**name, num=5, skip=3))
    for part in name:
        assert not np.isclose(uniforms(**{**name, part: 5}, num=8), one).any()


@pytest.mark.parametrize(
    "how", [SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(top_p=0.9)]
)
def test_how_many_rows_are_drawn_at_once_changes_no_bit(how, monkeypatch):
    logits = 3 * torch.randn(13, 1001, generator=torch.Generator().manual_seed(0))
    numbers = torch.from_numpy(uniforms(seed=0, step=0, prompt=0, sample=0, num=13))
    together = sample_tokens(logits, numbers, how)
    monkeypatch.setattr(token_sampling, "CHUNK_LOGITS", 2500)
    in_parts = sample_tokens(logits, numbers, how)
    assert torch.equal(together.token_ids, in_parts.token_ids)
    assert torch.equal(together.logp, in_parts.logp)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    "row",
    [[0.0, torch.nan, 0.0], [torch.nan, 0.0, 0.0], [0.0, 0.0, torch.inf], [-torch.inf] * 3],
)
def test_logits_that_are_not_numbers_are_refused_with_a_reason(temperature, row):
    logits = torch.tensor([[0.0, 0.0, -torch.inf], row])
    numbers = torch.tensor([0.5, 0.5], dtype=torch.float64)
    with pytest.raises(PolicyError, match=r"Lower learner\.learning_rate"):
        sample_tokens(logits, numbers, SamplingParams(temperature=temperature))
    sample_tokens(logits[:1], numbers[:1], SamplingParams(temperature=temperature))
