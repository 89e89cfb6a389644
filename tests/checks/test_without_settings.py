"""Causes that a dump shows without the emitters of tokens, entropies or settings of the sampler."""

from dataclasses import replace

import numpy as np
import pytest

from checks.exact_records import case
from checks.test_gap_contexts import LENGTH, ROWS, VOCABULARY, at, dumped, log_softmax, verdict
from klinic.checks import (
    Verdict,
    corrupted_sync,
    misaligned_logp,
    stale_sampler,
    wrong_loss_mask,
)

POSITION = np.arange(ROWS * LENGTH) % LENGTH


@pytest.mark.parametrize("missing", [0.0, np.nan])
def test_spans_without_a_sampler_log_prob_are_not_the_policys(missing):
    dump = dumped(at(1.0))
    of_tool = (POSITION >= 4) & (POSITION < 9)
    sampler = np.where(of_tool, missing, dump.logp_sampler)
    changed = replace(dump, logp_sampler=sampler, logp_old=dump.logp_old - 2.0 * of_tool)
    assert verdict(wrong_loss_mask, changed) is Verdict.FAIL
    masked = replace(changed, loss_mask=~of_tool)
    assert verdict(wrong_loss_mask, masked) is Verdict.NO_DATA


def test_single_lost_log_probs_are_misaligned_and_no_mask():
    dump = dumped(at(1.0))
    lost = (np.arange(ROWS * LENGTH) % 29 == 0) & (dump.logp_old < -1)
    changed = replace(dump, logp_sampler=np.where(lost, 0.0, dump.logp_sampler))
    assert verdict(wrong_loss_mask, changed) is Verdict.NO_DATA
    assert verdict(misaligned_logp, changed) is Verdict.FAIL


def test_certain_tokens_may_have_a_log_prob_of_0():
    dump = dumped(at(1.0))
    certain = (POSITION >= 4) & (POSITION < 9)
    changed = replace(
        dump,
        logp_sampler=np.where(certain, 0.0, dump.logp_sampler),
        logp_old=np.where(certain, -1e-4, dump.logp_old),
    )
    assert verdict(wrong_loss_mask, changed) is Verdict.NO_DATA


def test_an_inverted_mask_leaves_out_what_was_sampled():
    dump = dumped(at(1.0))
    of_tool = POSITION >= 6
    sampler = np.where(of_tool, 0.0, np.minimum(dump.logp_sampler, -1e-3))
    changed = replace(dump, logp_sampler=sampler, loss_mask=of_tool | (POSITION == 0))
    assert verdict(wrong_loss_mask, changed) is Verdict.FAIL


def judged_after(updates, change):
    start = replace(dumped(at(1.0)), entropy=None, facts={"learner_version": 0})
    other = np.random.default_rng(4).normal(size=VOCABULARY)
    later = dumped(lambda policy, _: log_softmax(policy + change * other))
    later = replace(later, step=updates + 1, entropy=None, facts={"learner_version": updates})
    sick = replace(case(later, run={}), run={}, start=start, earlier=(start,))
    return corrupted_sync.CHECK(sick).verdict


def test_a_sampler_that_is_far_away_after_one_update_has_damaged_weights():
    assert judged_after(1, 1.5) is Verdict.FAIL
    assert judged_after(1, 0.3) is Verdict.NO_DATA
    assert judged_after(30, 1.5) is Verdict.NO_DATA  # old weights may be as far away


def lagging(lag, gaps):
    """Return the verdict on the last of steps with these gaps, of a sampler that may lag."""
    steps = [
        replace(
            dumped(at(1.0), seed=step, noise=gap),
            step=step + 1,
            facts={"learner_version": step},
        )
        for step, gap in enumerate(gaps)
    ]
    last = replace(
        case(steps[-1], run={}),
        run={"sampler": {"max_version_lag": lag}},
        start=steps[0],
        earlier=tuple(steps[:-1]),
    )
    return stale_sampler.CHECK(last).verdict


def test_a_sampler_that_is_behind_by_design_is_compared_with_its_first_lag():
    assert lagging(0, [0.003, 0.1]) is Verdict.FAIL
    assert lagging(1, [0.003, 0.1]) is Verdict.NO_DATA
    assert lagging(1, [0.003, 0.1, 0.12]) is Verdict.PASS
    assert lagging(1, [0.003, 0.02, 0.3]) is Verdict.FAIL
