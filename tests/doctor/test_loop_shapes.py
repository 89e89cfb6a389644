"""Healthy loops of other shapes have no cause, and their faults are still named."""

import io
from copy import deepcopy

import numpy as np
import pytest
from rich.console import Console

from doctor.toy_loop import (
    EOS,
    GROUP,
    VOCABULARY,
    Policy,
    record_samples,
    sample,
    sample_row,
    train_step,
)
from klinic import Recorder
from klinic.checks import CHECKS, Verdict, samples_too_old
from klinic.doctor.cases import read_cases
from klinic.doctor.diagnosis import diagnose
from klinic.evidence import store
from klinic.evidence.record import EmittedBy

SETTINGS = {
    "eos_ids": [EOS],
    "vocabulary_size": VOCABULARY,
    "untrained": True,
    "temperature": 1.0,
    "dtype": "fp32",
    "group_size": GROUP,
}


def make(folder, **settings):
    console = Console(file=io.StringIO())
    given = {**SETTINGS, "advantage": "group_mean", **settings}
    return Recorder(folder, doctor="none", console=console, **given)


def cause_of(folder):
    found = diagnose(read_cases(folder), CHECKS)
    return None if found.cause is None else (found.cause, found.sentence)


def verdicts(folder, check):
    return [check.CHECK(case).verdict for case in read_cases(folder)]


def split(batch, num, random=None):
    """Yield mini-batches, of shuffled rows if there is a random stream."""
    rows = np.arange(len(batch.prompts))
    for part in np.array_split(rows if random is None else random.permutation(rows), num):
        yield batch.rows(part)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("settings", [{}, {"updates_per_generation": 8}, {"max_version_lag": 0}])
def test_mini_batches_and_epochs_are_no_staleness(tmp_path, settings, shuffled):
    random, policy = np.random.default_rng(0), Policy()
    reference = deepcopy(policy)
    with make(tmp_path / "run", **settings) as recorder:
        for _ in range(3):
            batch, old = sample(policy, random), deepcopy(policy)
            record_samples(recorder, batch)
            for _ in range(2):
                for part in split(batch, 4, random if shuffled else None):
                    train_step(recorder, policy, part, reference, old=old)
    facts = [store.read_record(tmp_path / "run", step).facts for step in (1, 8, 9)]
    assert [line["updates_on_generation"] for line in facts] == [0, 7, 0]
    assert verdicts(tmp_path / "run", samples_too_old) == [Verdict.PASS] * 24
    assert cause_of(tmp_path / "run") is None


def test_more_updates_than_declared_are_too_many(tmp_path):
    random, policy = np.random.default_rng(0), Policy()
    with make(tmp_path / "run", updates_per_generation=2) as recorder:
        batch, old = sample(policy, random), deepcopy(policy)
        record_samples(recorder, batch)
        for _ in range(3):
            train_step(recorder, policy, batch, old, old=old)
    assert verdicts(tmp_path / "run", samples_too_old)[-1] is Verdict.FAIL


@pytest.mark.parametrize("lag", [None, 1])
def test_samples_ahead_are_joined_and_as_old_as_declared(tmp_path, lag):
    random, policy = np.random.default_rng(0), Policy()
    reference, waiting = deepcopy(policy), []
    with make(tmp_path / "run", max_version_lag=lag) as recorder:
        for _ in range(5):
            waiting.append((sample(policy, random), deepcopy(policy)))
            record_samples(recorder, waiting[-1][0])
            if len(waiting) > 1:
                batch, old = waiting.pop(0)
                train_step(recorder, policy, batch, reference, old=old)
    records = [store.read_record(tmp_path / "run", step) for step in (1, 2, 3, 4)]
    for record in records:
        assert (record.emitted_by == EmittedBy.POLICY).all()
        np.testing.assert_allclose(record.logp_sampler, record.logp_old, atol=1e-6)
        assert (record.weight_version == max(record.step - 2, 0)).all()
    expected = Verdict.FAIL if lag is None else Verdict.PASS
    assert verdicts(tmp_path / "run", samples_too_old)[-1] is expected
    if lag is not None:
        assert cause_of(tmp_path / "run") is None


def test_the_first_generation_for_ever_is_too_old(tmp_path):
    random, policy = np.random.default_rng(0), Policy()
    reference, first = deepcopy(policy), None
    with make(tmp_path / "run") as recorder:
        for _ in range(3):
            batch = sample(policy, random)
            first = first or batch
            record_samples(recorder, batch)
            train_step(recorder, policy, first, reference, old=reference)
    found = verdicts(tmp_path / "run", samples_too_old)
    assert found == [Verdict.PASS, Verdict.FAIL, Verdict.FAIL]


@pytest.mark.parametrize("group_size", [GROUP, None])
@pytest.mark.parametrize("advantage", ["group_mean", "group_std"])
def test_dropped_rows_are_no_fault_of_the_groups(tmp_path, advantage, group_size):
    random, policy = np.random.default_rng(0), Policy()
    reference = deepcopy(policy)
    with make(tmp_path / "run", advantage=advantage, group_size=group_size) as recorder:
        for _ in range(6):
            batch = sample(policy, random)
            if advantage == "group_std":
                spread = batch.reward.reshape(-1, GROUP).std(1, ddof=1)[batch.group]
                batch.advantage = batch.advantage / (spread + 1e-4)
            record_samples(recorder, batch)
            kept = (batch.group < 6) | (random.random(len(batch.group)) < 0.3)
            train_step(recorder, policy, batch.rows(np.flatnonzero(kept)), reference)
    assert cause_of(tmp_path / "run") is None


def test_epochs_whose_ratio_is_always_1_are_named(tmp_path):
    random, policy = np.random.default_rng(0), Policy()
    reference = deepcopy(policy)
    with make(tmp_path / "run") as recorder:
        for _ in range(3):
            batch = sample(policy, random)
            record_samples(recorder, batch)
            for _ in range(3):
                train_step(recorder, policy, batch, reference)
    assert cause_of(tmp_path / "run")[0] == "ratio-not-applied"


def merge_repeats(ids):
    """Encode as another tokenizer does: a repeated token is one token."""
    return [token for n, token in enumerate(ids) if n == 0 or token != ids[n - 1]]


@pytest.mark.parametrize("every", [1, 16], ids=["all rows", "few rows"])
@pytest.mark.parametrize("knows_sampler", [True, False])
def test_rows_that_were_encoded_again_are_named(tmp_path, every, knows_sampler):
    random, policy = np.random.default_rng(0), Policy()
    reference = deepcopy(policy)
    with make(tmp_path / "run") as recorder:
        for _ in range(3):
            batch = sample(policy, random)
            if not knows_sampler:
                batch.logp_sampler = None
            record_samples(recorder, batch)
            batch.completions = [
                ids if row % every else merge_repeats(ids)
                for row, ids in enumerate(batch.completions)
            ]
            train_step(recorder, policy, batch, reference)
    record = store.read_record(tmp_path / "run", 3)
    assert record.facts["num_reencoded_rows"] > 0
    assert record.facts["num_reencoded_rows"] == (~record.round_trip).sum()
    assert (record.emitted_by == EmittedBy.POLICY).all()
    if knows_sampler:
        known = np.isfinite(record.logp_sampler)
        assert not known.all()
        np.testing.assert_allclose(record.logp_sampler[known], record.logp_old[known], atol=1e-6)
    assert cause_of(tmp_path / "run")[0] == "retokenised"


TOOL = [3, 4, 5]


def test_turns_with_tokens_of_a_tool_between_them_have_no_cause(tmp_path):
    """A turn is sampled with its whole context, and recorded by a call of its own."""
    random, policy = np.random.default_rng(0), Policy()
    reference = deepcopy(policy)
    with make(tmp_path / "run") as recorder:
        for _ in range(3):
            first = sample(policy, random)
            contexts = [
                [*p, *ids, *TOOL] for p, ids in zip(first.prompts, first.completions, strict=True)
            ]
            second = [sample_row(policy, p[0], random, TOOL[-1]) for p in first.prompts]
            rows = deepcopy(first)
            rows.completions = [[*c[1:], *ids] for c, ids in zip(contexts, second, strict=True)]
            logp = policy.logp(rows)
            tails = [values[-len(ids) :] for values, ids in zip(logp, second, strict=True)]
            turns = [(first.prompts, first.completions, first.logp_sampler)]
            turns.append((contexts, second, tails))
            for prompts, completions, scores in turns:
                recorder.record_samples(
                    prompt_ids=prompts, completion_ids=completions, logp_sampler=scores
                )
            mask = [
                [1] * len(one) + [0] * len(TOOL) + [1] * len(two)
                for one, two in zip(first.completions, second, strict=True)
            ]
            train_step(
                recorder,
                policy,
                rows,
                reference,
                loss_mask=mask,
                reward=rows.reward,
                group=rows.group,
            )
    record = store.read_record(tmp_path / "run", 2)
    is_tool = record.emitted_by == EmittedBy.TOOL
    assert is_tool.sum() == len(TOOL) * record.num_rows
    assert (record.loss_mask == ~is_tool).all()
    assert (np.isnan(record.logp_sampler) == is_tool).all()
    assert record.facts["num_reencoded_rows"] == 0
    assert cause_of(tmp_path / "run") is None
