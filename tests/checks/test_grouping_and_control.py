"""Advantages of other rows, log-probs of other rows, clip ranges and controllers of the KL."""

from dataclasses import replace

import numpy as np
import pytest

from checks.exact_records import GROUP, ROWS, case, judged, moved, record
from klinic.checks import (
    Verdict,
    clip_range_wrong,
    kl_controller_reversed,
    misaligned_logp,
    retokenised,
    wrong_groups,
)
from klinic.checks.folded_ids import find_folded_ids
from klinic.evidence.redaction import Redaction
from klinic.maths import advantage as estimators

PASS, FAIL, NO_DATA = Verdict.PASS, Verdict.FAIL, Verdict.NO_DATA
INDEX = np.arange(ROWS)


def with_advantage(values, **columns):
    given = replace(record(), reward=np.random.default_rng(7).normal(size=ROWS), **columns)
    return replace(given, advantage=values(given.reward, given.group))


def in_groups(group, order=INDEX, estimate=estimators.leave_one_out):
    """Return an estimator that uses other groups, and the rewards of other rows."""
    return lambda reward, _: estimate(reward[order], group)


OTHER = {
    "consecutive": (in_groups(INDEX // GROUP), {"group": INDEX % (ROWS // GROUP)}),
    "strided": (in_groups(INDEX % (ROWS // GROUP)), {}),
    "shifted rewards": (in_groups(INDEX // GROUP, np.roll(INDEX, -1)), {}),
    "shifted groups": (in_groups(np.roll(INDEX // GROUP, -2), np.roll(INDEX, -2)), {}),
}


@pytest.mark.parametrize("declared", [{}, {"advantage": None}])
@pytest.mark.parametrize("name", OTHER)
def test_advantages_of_other_rows_are_named_with_and_without_an_estimator(name, declared):
    values, columns = OTHER[name]
    finding = wrong_groups.CHECK(case(with_advantage(values, **columns), run=declared))
    assert finding.verdict is FAIL
    assert "those of the rewards of" in finding.summary


def test_prompts_that_come_twice_form_one_group_by_text():
    prompts = INDEX // (2 * GROUP)
    given = with_advantage(
        in_groups(prompts), prompt_ids=prompts, prompt_offsets=np.arange(ROWS + 1)
    )
    finding = wrong_groups.CHECK(case(given, run={"advantage": None}))
    assert (finding.verdict, "the same prompt" in finding.summary) == (FAIL, True)


@pytest.mark.parametrize("trainer", ["slime", "trl", None])
@pytest.mark.parametrize("advantage", [None, "batch"])
def test_a_batch_is_a_choice_but_in_trainers_without_it(trainer, advantage):
    given = with_advantage(in_groups(INDEX // GROUP, estimate=estimators.batch))
    expected = FAIL if trainer == "slime" else NO_DATA
    assert judged(wrong_groups, given, run={"advantage": advantage, "trainer": trainer}) is expected


def test_a_declared_group_estimator_over_the_batch_is_described():
    given = with_advantage(in_groups(INDEX // GROUP, estimate=estimators.batch))
    finding = wrong_groups.CHECK(case(given))
    assert finding.verdict is FAIL
    assert "the whole batch" in finding.summary


@pytest.mark.parametrize("estimator", ["group_mean", "group_std", "leave_one_out"])
def test_advantages_of_their_own_group_are_not_explained_by_others(estimator):
    given = with_advantage(in_groups(INDEX // GROUP, estimate=getattr(estimators, estimator)))
    assert judged(wrong_groups, given, run={"advantage": None, "trainer": "slime"}) is NO_DATA
    assert judged(wrong_groups, given, run={"advantage": estimator}) is PASS


def test_few_orders_of_rewards_fit_by_chance():
    given = with_advantage(in_groups(INDEX % (ROWS // GROUP)))
    reward = (INDEX == 0).astype(float)
    given = replace(
        given, reward=reward, advantage=estimators.leave_one_out(reward, INDEX % (ROWS // GROUP))
    )
    assert judged(wrong_groups, given, run={"advantage": None}) is NO_DATA


# --- log-probs of other rows


def row_order(values, order):
    return np.asarray(values).reshape(ROWS, -1)[order].ravel()


@pytest.mark.parametrize("column", ["logp_ref", "logp_sampler"])
def test_log_probs_of_other_rows_are_misaligned(column):
    given = record()
    order = np.random.default_rng(1).permutation(ROWS)
    given = replace(given, **{column: row_order(getattr(given, column), order)})
    finding = misaligned_logp.CHECK(case(given))
    assert (finding.verdict, "another row" in finding.summary) == (FAIL, True)


def test_a_gap_that_no_row_explains_is_not_one_of_rows():
    given = record()
    noise = np.random.default_rng(2).normal(size=given.num_tokens)
    given = replace(given, logp_sampler=given.logp_old + noise)
    assert "another row" not in misaligned_logp.CHECK(case(given)).summary


# --- ids that were folded


def folded(*, after=1.0, surprise=4.0, genuine=False):
    """Return a record in which half of the rows have a foreign id in their middle."""
    given = record()
    ids, sampler = np.array(given.token_ids), np.array(given.logp_sampler)
    for row in range(0, ROWS, 2):
        place = row * 10 + 4
        ids[place] = 40 + row % 4
        sampler[place] = given.logp_old[place] + surprise
        sampler[place + 1 : row * 10 + 10] += after
    if genuine:
        ids[15] = 40
    return replace(given, token_ids=ids, logp_sampler=sampler)


@pytest.mark.parametrize("round_trip", [None, np.ones(ROWS, bool)])
def test_rows_that_agree_up_to_a_foreign_id_were_encoded_again(round_trip):
    given = replace(folded(), round_trip=round_trip)
    assert judged(retokenised, given) is FAIL


def test_folded_ids_are_found_where_ids_are_renumbered_by_prompt():
    given = folded()
    redacted = Redaction({}).record(given)
    assert not np.array_equal(redacted.token_ids, given.token_ids)
    found = find_folded_ids(given)
    assert found is not None
    assert find_folded_ids(redacted) == found


@pytest.mark.parametrize(
    "given",
    [
        folded(after=0.0),
        folded(surprise=-4.0),
        folded(genuine=True),
        record(noise=0.05),
        record(noise=1.0),
        record(),
    ],
    ids=["only the token", "likelier", "in other rows", "rounding", "noise", "no gap"],
)
def test_other_gaps_are_no_folded_ids(given):
    assert judged(retokenised, given) is not FAIL


def test_ids_that_were_compared_with_the_sampled_ones_are_not_suspected():
    facts = {**record().facts, "num_changed_rows": 0, "num_reencoded_rows": 0}
    assert judged(retokenised, replace(folded(), facts=facts)) is PASS


# --- clip ranges


def clip_case(low, *, size=1e-3, name="grpo", clip_ratio=None):
    old = record()
    given = replace(moved(old, size), logp_old=old.logp_old)
    loss = {"name": name} if low is None else {"name": name, "clip_low": low, "clip_high": low}
    metrics = {} if clip_ratio is None else {given.step: {"clip_ratio": clip_ratio}}
    return judged(clip_range_wrong, given, run={"loss": loss}, metrics=metrics)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"low": 1e-6}, FAIL),
        ({"low": 1e-6, "size": 0.0}, PASS),
        ({"low": 1e-6, "size": 1e-9}, PASS),
        ({"low": 3e-4, "name": "gspo"}, PASS),
        ({"low": 0.2}, PASS),
        ({"low": 0.2, "size": 0.3}, PASS),
        ({"low": None, "clip_ratio": 0.48}, FAIL),
        ({"low": 0.2, "clip_ratio": 0.48}, FAIL),
        ({"low": None, "clip_ratio": 0.48, "size": 0.5}, PASS),
        ({"low": None, "clip_ratio": 0.01}, PASS),
        ({"low": None, "clip_ratio": 0.48, "name": "gspo"}, NO_DATA),
        ({"low": None}, NO_DATA),
    ],
)
def test_a_clip_range_is_judged_by_the_ratios_that_it_holds(given, expected):
    assert clip_case(**given) is expected


# --- controllers


def controlled(kls, rule, run=None):
    """Return the verdict on steps with these KLs, whose coefficients follow a rule."""
    coef, records, before = 0.05, [], kls[0]
    for number, kl in enumerate(kls):
        given = record(step=number + 1, version=number)
        given = replace(
            given,
            logp_ref=given.logp_old - kl,
            facts={**given.facts, "kl_coef": coef},
        )
        records.append(given)
        coef *= 1 + rule(kl, before)
        before = kl
    return judged(kl_controller_reversed, records[-1], earlier=records[:-1], run=run)


def ziegler(kl, _):
    return 0.1 * float(np.clip(kl / 0.05 - 1, -0.2, 0.2))


def backwards(kl, before):
    return -ziegler(kl, before)


def with_slope(kl, before):
    return ziegler(kl, before) + 2 * float(np.clip(np.log(kl / before), -0.2, 0.2))


RISING = np.linspace(0.06, 0.6, 14)
WAVE = 0.05 + 0.04 * np.sin(np.arange(18) * 0.8)
TARGET = {"kl_target": 0.05}


@pytest.mark.parametrize(
    ("kls", "rule", "run", "expected"),
    [
        (RISING, backwards, TARGET, FAIL),
        (RISING, ziegler, TARGET, PASS),
        (RISING[::-1], with_slope, TARGET, NO_DATA),
        (RISING, backwards, None, NO_DATA),
        (WAVE, backwards, None, FAIL),
        (WAVE, ziegler, None, NO_DATA),
        (WAVE, with_slope, None, NO_DATA),
        (WAVE, backwards, TARGET, FAIL),
        (WAVE, with_slope, TARGET, PASS),
        (WAVE, lambda *_: 0.0, None, PASS),
        (WAVE[:5], backwards, TARGET, NO_DATA),
    ],
)
def test_a_controller_is_judged_where_it_has_no_excuse(kls, rule, run, expected):
    assert controlled(kls, rule, run) is expected
