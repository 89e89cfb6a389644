"""Gaps whose form decides: settings that change, forbidden tokens, older weights, wrong ratios."""

from dataclasses import replace

import numpy as np
import pytest

from checks.exact_records import (
    LENGTH,
    ROWS,
    VOCABULARY,
    distributions,
    judged,
    log_softmax,
    moved,
    record,
)
from checks.test_gap_models import failing, scored, sharp, winner
from klinic.checks import (
    Verdict,
    hidden_sampling_transform,
    imprecise_logp,
    misaligned_logp,
    ratio_not_applied,
    stale_sampler,
    temperature_on_one_side,
)
from klinic.checks.gap_models import GapModel

PASS, FAIL, NO_DATA = Verdict.PASS, Verdict.FAIL, Verdict.NO_DATA


def later(found, version=6, sampled_by=None):
    """Return a record of a step after some updates, sampled by the weights of a version."""
    facts = {**found.facts, "learner_version": version}
    versions = np.full(found.num_tokens, version if sampled_by is None else sampled_by)
    return replace(found, step=version + 1, facts=facts, weight_version=versions)


def with_temperature(seed, temperature):
    learner = distributions(seed)
    return scored(learner, log_softmax(learner / temperature), seed)


@pytest.mark.parametrize("seed", range(4))
def test_a_temperature_that_changes_in_the_middle_of_a_run_is_no_old_weights(seed):
    found, start = later(with_temperature(seed, 0.9)), record(seed)
    assert judged(temperature_on_one_side, found, start=start) is FAIL
    assert judged(stale_sampler, found, start=start) is PASS


@pytest.mark.parametrize("seed", range(4))
def test_old_weights_are_no_temperature(seed):
    start, found = record(seed), moved(record(seed), 0.3, seed)
    assert judged(stale_sampler, found, start=start) is FAIL
    assert judged(temperature_on_one_side, found, start=start) is not FAIL


def test_a_sampler_that_agrees_with_the_policy_is_not_old_although_logp_old_differs():
    start, found = record(), moved(record(), 0.3)
    found = replace(found, logp=found.logp_sampler, logp_ref=None)
    assert judged(stale_sampler, found, start=start) is PASS


@pytest.mark.parametrize("seed", range(4))
def test_what_is_wrong_with_old_samples_is_not_read_from_their_gap(seed):
    aged = later(with_temperature(seed, 0.7), sampled_by=5)
    assert winner(aged) is None
    checks = (temperature_on_one_side, hidden_sampling_transform)
    assert [judged(check, aged) for check in checks] == [NO_DATA, NO_DATA]
    fresh = later(with_temperature(seed, 0.7))
    assert judged(temperature_on_one_side, fresh) is FAIL


def forbidding(learner, token, positions):
    """Return distributions without a token at some positions of each row."""
    allowed = learner.reshape(ROWS, LENGTH, VOCABULARY).copy()
    allowed[:, positions, token] = -40.0
    return log_softmax(allowed.reshape(-1, VOCABULARY))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mass", [2.0, 6.0])
def test_a_forbidden_token_is_a_hidden_transform_however_likely_it_was(seed, mass):
    learner = sharp(seed, width=2.0).reshape(ROWS, LENGTH, VOCABULARY)
    learner[:, :3, 1] += mass
    learner = log_softmax(learner.reshape(-1, VOCABULARY))
    found = scored(learner, forbidding(learner, 1, slice(0, 3)), seed)
    assert winner(found) in (GapModel.SUPPRESSION, GapModel.TRUNCATION)
    assert judged(hidden_sampling_transform, found) is FAIL
    assert judged(misaligned_logp, found) is PASS


@pytest.mark.parametrize("seed", range(4))
def test_coarse_weights_are_noise_and_no_penalty(seed):
    prompts = np.arange(ROWS * 4) % VOCABULARY
    found = record(seed, noise=0.1, prompt_ids=prompts, prompt_offsets=np.arange(ROWS + 1) * 4)
    assert judged(imprecise_logp, found) is FAIL
    assert failing(found) == ["imprecise-logp"]


class TestRatioToTheReference:
    def found(self, seed=0):
        """Return a step whose old log-probs are the reference's, and the policy has moved."""
        start = record(seed)
        policy = start.logp_old + 0.2 * np.random.default_rng(seed).normal(size=start.num_tokens)
        return replace(later(start), logp=policy, logp_sampler=policy, logp_old=start.logp_ref)

    def test_it_fails(self):
        assert judged(ratio_not_applied, self.found()) is FAIL

    def test_before_the_policy_moves_they_are_the_same(self):
        assert judged(ratio_not_applied, record()) is not FAIL

    def test_a_sampler_that_agrees_with_neither_is_another_fault(self):
        found = self.found()
        other = found.logp + 0.2 * np.random.default_rng(9).normal(size=found.num_tokens)
        assert judged(ratio_not_applied, replace(found, logp_sampler=other)) is not FAIL

    def test_old_log_probs_of_the_policy_pass_however_far_the_reference_is(self):
        found = self.found()
        assert judged(ratio_not_applied, replace(found, logp_old=found.logp)) is not FAIL

    def test_the_sampler_is_not_old(self):
        assert judged(stale_sampler, self.found(), start=record()) is PASS
