"""Rows are found again by their ids, wherever a trainer put them."""

import numpy as np
import pytest

from klinic.evidence.row_join import (
    UNMATCHED,
    Emission,
    EmissionIndex,
    match_rows,
    row_key,
)


def ids(*numbers):
    return np.array(numbers, np.int64)


def emission(context, tokens, *, is_ended=False):
    return Emission(
        context=ids(*context),
        token_ids=ids(*tokens),
        logp=-np.arange(1, len(tokens) + 1, dtype=np.float32),
        is_ended=is_ended,
    )


def trace(emissions, prompt, completion, row=0, num_rows=1):
    index = EmissionIndex(emissions)
    return index.trace_tokens(ids(*prompt), ids(*completion), row=row, num_rows=num_rows)


def test_a_permutation_is_undone():
    keys = [row_key(ids(1), ids(n)) for n in range(5)]
    order = [3, 0, 4, 1, 2]
    assert match_rows([keys[n] for n in order], keys, expected=range(5)).tolist() == order


def test_equal_rows_stay_where_they_are_expected():
    assert match_rows([b"a"] * 3, [b"a"] * 3, expected=[2, 0, 1]).tolist() == [2, 0, 1]


def test_equal_rows_that_moved_take_the_order_of_their_advantages():
    """Advantages grow with rewards: the row of the largest gets the sample of the largest."""
    found = match_rows(
        [b"b", b"a", b"a"],
        [b"a", b"a", b"b"],
        expected=[0, 1, 2],
        trained_order=[0.0, 1.0, -1.0],
        sampled_order=[0.2, 0.7, 0.0],
    )
    assert found.tolist() == [2, 1, 0]


def test_ids_that_nobody_sampled_have_no_row():
    assert match_rows([b"x"], [b"a"], expected=[0]).tolist() == [UNMATCHED]


def test_a_row_that_is_trained_twice_has_one_sample():
    assert match_rows([b"a", b"a"], [b"a"], expected=[0, 1]).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("one", "other"), [((1, 2), (3,)), ((1,), (2, 3)), ((), (1, 2, 3))], ids=str
)
def test_the_border_of_the_prompt_is_part_of_the_key(one, other):
    assert row_key(ids(*one), ids(*other)) != row_key(ids(*one, *other), ids())


def test_what_was_emitted_is_the_policys_with_its_log_probs():
    found = trace([emission((5, 6), (7, 8))], (5, 6), (7, 8))
    assert found.emitted.all()
    assert not found.replaced.any()
    assert found.logp.tolist() == [-1.0, -2.0]
    assert found.context.tolist() == [5, 6]


def test_appended_tokens_are_not_the_policys():
    found = trace([emission((5,), (7, 8), is_ended=True)], (5,), (7, 8, 3, 4))
    assert found.emitted.tolist() == [True, True, False, False]
    assert not found.replaced.any()
    assert np.isnan(found.logp[2:]).all()


def test_tokens_appended_in_place_of_the_end_token_are_not_the_policys():
    found = trace([emission((5,), (7, 0), is_ended=True)], (5,), (7, 3, 4))
    assert found.emitted.tolist() == [True, False, False]
    assert not found.replaced.any()


def test_a_second_turn_is_found_after_the_tokens_of_a_tool():
    turns = [emission((5,), (7, 8)), emission((5, 7, 8, 3), (9,))]
    found = trace(turns, (5,), (7, 8, 3, 9))
    assert found.emitted.tolist() == [True, True, False, True]
    assert found.logp[[0, 1, 3]].tolist() == [-1.0, -2.0, -1.0]


LAST_TURNS = {
    "other ids between the turns": ((5,), (7, 8, 3, 9, 2), True),
    "fewer ids between the turns": ((5,), (7, 8, 9, 2), True),
    "another first turn": ((5,), (7, 6, 3, 9, 2), False),
    "another last turn": ((5,), (7, 8, 3, 9, 4), False),
    "after the turn": ((5,), (7, 8, 3, 9, 2, 3), False),
    "as it was sampled": ((5,), (7, 8, 4, 4, 9, 2), False),
}


@pytest.mark.parametrize(("prompt", "trained", "expected"), LAST_TURNS.values(), ids=LAST_TURNS)
def test_a_last_turn_that_was_sampled_after_other_ids_is_the_policys_elsewhere(
    prompt, trained, expected
):
    found = trace([emission((5,), (7, 8)), emission((5, 7, 8, 4, 4), (9, 2))], prompt, trained)
    assert found.is_elsewhere is expected
    if expected:
        assert found.emitted.tolist() == [True, True] + [False] * (len(trained) - 4) + [True, True]
        assert found.logp[-2:].tolist() == [-1.0, -2.0]


def test_other_ids_in_place_of_the_emitted_are_replaced_not_inserted():
    found = trace([emission((5,), (7, 8, 9))], (5,), (7, 2, 9))
    assert found.emitted.all()
    assert found.replaced.tolist() == [False, True, False]
    assert found.is_reencoded
    assert found.logp[0] == -1.0
    assert np.isnan(found.logp[1:]).all()  # the sampler attended to 8, not to 2


@pytest.mark.parametrize("trained", [(7, 1, 9), (7, 1, 2, 8, 8, 9)], ids=["shorter", "longer"])
def test_rows_of_another_length_that_end_alike_were_encoded_again(trained):
    found = trace([emission((5,), (7, 8, 8, 9))], (5,), trained)
    assert found.is_reencoded
    assert found.emitted.all()
    assert np.isfinite(found.logp).tolist() == [True] + [False] * (len(trained) - 1)


def test_a_row_whose_end_was_written_over_was_not_encoded_again():
    found = trace([emission((5,), (7, 8, 9))], (5,), (7, 4, 4))
    assert found.replaced.any()
    assert not found.is_reencoded


def test_a_cut_row_was_not_encoded_again():
    assert not trace([emission((5,), (7, 8, 9))], (5,), (7, 8)).is_reencoded


def test_a_sampler_that_went_on_from_other_ids_shows_that_they_were_encoded_again():
    turns = [emission((5,), (7, 8)), emission((5, 6, 3), (9, 1))]
    found = trace(turns, (5,), (6, 3, 9, 1))
    assert found.is_reencoded
    assert np.isnan(found.logp[:2]).all()
    assert found.logp[2:].tolist() == [-1.0, -2.0]


def test_a_turn_that_the_row_begins_with_is_taken_whatever_the_row_ends_with():
    group = [emission((5,), (7, 4)), emission((5,), (7, 1, 9, 9, 9))]
    found = trace(group, (5,), (7, 4, 3, 9, 9, 9))
    assert found.emitted.tolist() == [True, True, False, False, False, False]
    assert not found.is_reencoded


def test_a_changed_row_is_none_of_those_that_others_have():
    group = [emission((5,), (7, 7, 1, 2)), emission((5,), (7, 3, 3, 9))]
    index = EmissionIndex(group)
    row = {"row": 0, "num_rows": 2}
    assert index.trace_tokens(ids(5), ids(7, 7, 4), **row).first_emission == 0
    found = index.trace_tokens(ids(5), ids(7, 7, 4), **row, taken={0})
    assert found.first_emission == 1


def test_the_member_of_the_group_with_these_tokens_is_taken():
    group = [emission((5,), (7, 7)), emission((5,), (8, 9))]
    assert trace(group, (5,), (8, 9), row=0, num_rows=2).emitted.all()


def test_another_prompt_in_the_sampler_is_seen_by_the_position():
    found = trace([emission((6,), (7, 8))], (5, 6), (7, 8))
    assert found.context.tolist() == [6]
    assert found.emitted.all()


def test_without_any_emission_the_source_is_unknown():
    assert trace([], (5,), (7,)) is None
    assert trace([emission((6,), (1, 2))], (5,), (7, 8)) is None
