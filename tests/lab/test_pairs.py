"""The board of two faults in one run."""

import pytest

from klinic.lab.pairs import ALL_FAULTS, PairOutcome, draw_pairs

CAUSES = ("stale-sampler", "wrong-metric")


def outcome(named, residue=()):
    return PairOutcome(causes=CAUSES, named=named, residue=residue)


def test_pairs_have_two_causes_and_settings_that_agree():
    pairs = draw_pairs(200, 0)
    assert len(pairs) == 200
    for pair in pairs:
        one, other = (ALL_FAULTS[name].settings for name in (pair.first, pair.second))
        assert pair.first[0] != pair.second[0]
        assert all(one[key] == other[key] for key in one.keys() & other.keys())
    assert draw_pairs(200, 0) == pairs
    assert draw_pairs(200, 1) != pairs


@pytest.mark.parametrize(
    ("named", "residue", "first", "complete"),
    [
        (CAUSES, (), True, True),
        (CAUSES[:1], CAUSES[1:], True, True),
        (CAUSES[:1], (), True, False),
        (("equal-rewards", *CAUSES), (), False, False),
        ((), CAUSES, False, False),
    ],
)
def test_what_counts(named, residue, first, complete):
    said = outcome(named, residue)
    assert (said.is_first_right, said.is_complete) == (first, complete)
