"""Gaps among tokens of the same context, between turns, and of divided log-probs."""

from dataclasses import replace

import numpy as np
import pytest

from checks.exact_records import case, log_softmax
from klinic.checks import (
    Verdict,
    gap_grows_with_position,
    hidden_sampling_transform,
    prompt_mismatch,
    temperature_on_one_side,
    unnormalised_logp,
)
from klinic.checks.gap_contexts import context_slope
from klinic.checks.gap_models import GapModel, compete_on_sampler_gap
from klinic.checks.gap_tokens import collect_gap_tokens
from klinic.evidence.record import StepRecord

GROUPS, SIZE, LENGTH, VOCABULARY = 6, 8, 12, 24
ROWS = GROUPS * SIZE


def dumped(sampler_of, learner_of=lambda x: x, *, seed=0, noise=0.005, turns=False):
    """Return a dump of rows of a policy whose logits depend on the prompt and the last two tokens.

    `sampler_of` and `learner_of` make a side's log-probs from those of temperature 1. With
    `turns`, four tokens of an environment stand before the second half.
    """
    random = np.random.default_rng(seed)
    table = 2.5 * random.normal(size=(GROUPS, VOCABULARY + 1, VOCABULARY))
    ids, sampler, learner, entropy = [], [], [], []
    for row in range(ROWS):
        last = VOCABULARY
        for position in range(LENGTH):
            policy = log_softmax(table[row // SIZE, last] + 0.1 * position)
            drawn = sampler_of(policy, position)
            chosen = random.choice(VOCABULARY, p=np.exp(drawn) / np.exp(drawn).sum())
            scored = learner_of(policy)
            ids.append(chosen)
            sampler.append(drawn[chosen] + noise * random.normal())
            learner.append(scored[chosen])
            entropy.append(-(np.exp(policy) * policy).sum())
            last = chosen
    mask = np.ones(ROWS * LENGTH, bool)
    if turns:
        mask &= (np.arange(ROWS * LENGTH) % LENGTH < 4) | (np.arange(ROWS * LENGTH) % LENGTH > 7)
    return StepRecord(
        step=1,
        group=np.repeat(np.arange(GROUPS), SIZE),
        row_offsets=np.arange(ROWS + 1) * LENGTH,
        prompt_offsets=np.arange(ROWS + 1),
        prompt_ids=np.repeat(np.arange(GROUPS), SIZE),
        token_ids=np.array(ids),
        loss_mask=mask,
        logp_sampler=np.array(sampler),
        logp=np.array(learner),
        logp_old=np.array(learner),
        entropy=np.array(entropy),
    )


def at(temperature):
    return lambda policy, _: log_softmax(policy / temperature)


def verdict(check, dump):
    return check.CHECK(case(dump, run={})).verdict


def winner(dump):
    fit = compete_on_sampler_gap(dump).winner
    return None if fit is None else fit.model


@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.3])
def test_a_temperature_is_seen_without_entropies(temperature):
    dump = replace(dumped(at(temperature)), entropy=None)
    line = context_slope(collect_gap_tokens(dump, "logp_sampler"))
    assert line.slope == pytest.approx(1 / temperature - 1, rel=0.03)
    assert verdict(temperature_on_one_side, dump) is Verdict.FAIL


@pytest.mark.parametrize("seed", range(4))
def test_agreement_rules_a_temperature_out_without_entropies(seed):
    dump = replace(dumped(at(1.0), seed=seed), entropy=None)
    assert verdict(temperature_on_one_side, dump) is Verdict.PASS


@pytest.mark.parametrize("seed", range(4))
def test_another_network_is_no_temperature(seed):
    other = np.random.default_rng(seed + 50).normal(size=VOCABULARY)
    dump = dumped(lambda policy, _: log_softmax(policy + other), seed=seed)
    assert verdict(temperature_on_one_side, replace(dump, entropy=None)) is not Verdict.FAIL


def test_completions_without_a_shared_context_decide_nothing():
    dump = replace(dumped(at(0.6)), entropy=None, prompt_ids=np.arange(ROWS))
    assert context_slope(collect_gap_tokens(dump, "logp_sampler")) is None
    assert verdict(temperature_on_one_side, dump) is Verdict.NO_DATA


@pytest.mark.parametrize("temperature", [0.6, 0.8])
def test_log_probs_divided_after_the_softmax_are_not_normalised(temperature):
    dump = dumped(at(temperature), lambda policy: policy / temperature)
    assert winner(dump) is GapModel.DIVIDED
    assert verdict(unnormalised_logp, dump) is Verdict.FAIL
    assert verdict(hidden_sampling_transform, dump) is not Verdict.FAIL


def kept(policy, num):
    limit = np.sort(policy)[-num]
    return log_softmax(np.where(policy >= limit, policy, -1e9))


def nucleus(policy, top_p):
    order = np.argsort(-policy)
    before = np.cumsum(np.exp(policy[order])) - np.exp(policy[order])
    chosen = np.where(np.isin(np.arange(VOCABULARY), order[before < top_p]), policy, -1e9)
    return log_softmax(chosen)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "truncate",
    [
        lambda policy, _: kept(policy, 3),
        lambda policy, _: kept(policy, 6),
        lambda policy, _: nucleus(policy, 0.9),
        lambda policy, _: nucleus(policy, 0.6),
    ],
)
def test_a_truncation_is_not_taken_for_divided_log_probs(truncate, seed):
    dump = dumped(truncate, seed=seed, noise=0)
    assert winner(dump) is not GapModel.DIVIDED
    assert verdict(unnormalised_logp, dump) is Verdict.PASS


def test_a_second_turn_after_another_context_is_a_prompt_mismatch():
    other = np.random.default_rng(9).normal(size=VOCABULARY)
    dump = dumped(lambda policy, position: log_softmax(policy + other * (position > 7)), turns=True)
    assert winner(dump) is GapModel.TURNS
    assert verdict(prompt_mismatch, dump) is Verdict.FAIL
    assert verdict(gap_grows_with_position, dump) is Verdict.PASS


def test_a_gap_that_grows_within_the_first_turn_is_none_of_turns():
    other = np.random.default_rng(9).normal(size=VOCABULARY)
    dump = dumped(
        lambda policy, position: log_softmax(policy + other * min(position, 3) / 3), turns=True
    )
    assert winner(dump) is not GapModel.TURNS
    assert verdict(prompt_mismatch, dump) is Verdict.NO_DATA


def test_turns_that_agree_are_quiet():
    assert verdict(prompt_mismatch, dumped(at(1.0), turns=True)) is Verdict.NO_DATA
