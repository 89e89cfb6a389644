"""What is passed on of a run: equal stays equal, and nothing that is not listed passes."""

import json
from dataclasses import replace

import numpy as np
import pytest

from evidence.records import full_record
from klinic.checks.gap_tokens import repeated_tokens
from klinic.checks.measures import equal_completions
from klinic.evidence.fields import FACTS, METRICS, PROBES, RUN_KEYS
from klinic.evidence.record import ROW_FIELDS, TOKEN_FIELDS
from klinic.evidence.redaction import (
    FINGERPRINTS,
    ID_LISTS,
    RUN_RULES,
    Redaction,
    redact_metrics,
    redact_probe,
)

FACTS_OF_RUN = {
    "eos_ids": [7, 3],
    "declared_eos_ids": [3],
    "end_like_ids": [7, 9],
    "pad_id": 0,
    "vocabulary_size": 99,
}
CANARY = "canary of /home/ada on host7"
RENAMED = {"token_ids", "prompt_ids", "group", "sample", "finish_reason", "prompt_index"}
NEVER_PASSED = {"created", "seed"}


def any_record(seed):
    """Return a record with few different ids, among them special ones and impossible ones."""
    random = np.random.default_rng(seed)
    record = full_record(lengths=tuple(random.integers(0, 9, random.integers(0, 9)).tolist()))
    ids = np.array([0, 3, 7, 40, 41, 42, 98, 99, 120, -1, -100])
    changes = {
        "token_ids": random.choice(ids, record.num_tokens),
        "prompt_ids": random.choice(ids, 2 * record.num_rows),
        "group": random.integers(0, 4, record.num_rows) * random.choice([1, 10**9, -1]),
    }
    if seed % 3 == 0:
        changes |= {"prompt_ids": None, "prompt_offsets": None, "reward": None}
    return replace(record, **changes)


def redacted(record, **facts):
    return Redaction({**FACTS_OF_RUN, **facts}).record(record)


@pytest.mark.parametrize("seed", range(20))
def test_every_column_that_is_no_name_is_passed_on_bit_for_bit(seed):
    record = any_record(seed)
    after = redacted(record)
    for name in {*TOKEN_FIELDS, *ROW_FIELDS, "row_offsets", "prompt_offsets"} - RENAMED:
        np.testing.assert_array_equal(getattr(after, name), getattr(record, name))
    for one, other in zip(after.reward_parts.values(), record.reward_parts.values(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert all(name.startswith("part-") for name in after.reward_parts)


@pytest.mark.parametrize("seed", range(20))
def test_checks_find_the_same_repetitions_and_special_ids(seed):
    record = any_record(seed)
    redaction = Redaction(FACTS_OF_RUN)
    after, run = redaction.record(record), redaction.run_facts()
    assert sorted(equal_completions(after)) == sorted(equal_completions(record))
    if record.prompt_ids is not None:
        np.testing.assert_array_equal(repeated_tokens(after), repeated_tokens(record))
    for name in ID_LISTS:
        ends = np.isin(record.token_ids, FACTS_OF_RUN[name])
        np.testing.assert_array_equal(np.isin(after.token_ids, run[name]), ends)
    np.testing.assert_array_equal(after.token_ids == run["pad_id"], record.token_ids == 0)
    np.testing.assert_array_equal(after.token_ids >= 99, record.token_ids >= 99)
    np.testing.assert_array_equal(after.token_ids < 0, record.token_ids < 0)


def test_an_id_has_other_numbers_for_another_prompt_and_in_another_bundle():
    words = np.array([5, 6, 5, 8, 9, 7])
    lengths = np.arange(0, 241, 6)
    record = replace(
        full_record(lengths=(6,) * 40),
        token_ids=np.tile(words, 40),
        prompt_ids=np.arange(80),
        row_offsets=lengths,
    )
    ids = redacted(record, vocabulary_size=50_000).token_ids.reshape(20, 2, 6)
    np.testing.assert_array_equal(ids[:, 0], ids[:, 1])  # of one prompt
    assert len(np.unique(ids[:, 0, 0])) == 20
    assert (ids[..., 5] == ids[0, 0, 5]).all()  # 7 is an end token
    again = redacted(record, vocabulary_size=50_000).token_ids.reshape(20, 2, 6)
    assert (again[:, 0, 0] != ids[:, 0, 0]).any()


@pytest.mark.parametrize("length", [2, 5])
def test_different_prompts_stay_different_in_a_small_vocabulary(length):
    random = np.random.default_rng(0)
    prompts = [random.permutation(np.arange(10, 57))[:length] for _ in range(120)]
    redaction = Redaction({"eos_ids": [1], "vocabulary_size": 57})
    renumbered = set()
    for step, prompt in enumerate(prompts, 1):
        record = replace(
            full_record(step=step, lengths=(2,)),
            token_ids=np.array([11, 1]),
            group=np.array([0]),
            prompt_ids=prompt,
            prompt_offsets=np.array([0, length]),
        )
        renumbered.add(redaction.record(record).prompt_ids.tobytes())
    assert len(renumbered) == len({prompt.tobytes() for prompt in prompts})


def prompted_record(prompt, completions, step=1):
    """Return a record of one group for each row, all with the same prompt."""
    num = len(completions)
    return replace(
        full_record(step=step, lengths=(len(completions[0]),) * num),
        token_ids=np.concatenate(completions),
        group=np.arange(num),
        prompt_ids=np.tile(prompt, num),
        prompt_offsets=np.arange(num + 1) * len(prompt),
    )


@pytest.mark.parametrize("size", [None, 99])
def test_one_prompt_stays_one_in_all_groups_and_steps_and_so_do_its_completions(size):
    redaction = Redaction({"eos_ids": [1], "vocabulary_size": size})
    first = redaction.record(prompted_record([5, 6, 7], [[9, 8, 1], [5, 5, 2]]))
    later = redaction.record(prompted_record([5, 6, 7], [[9, 9, 9], [9, 8, 1]], step=2))
    prompts = {r.prompt_ids.reshape(2, 3)[row].tobytes() for r in (first, later) for row in (0, 1)}
    assert len(prompts) == 1
    np.testing.assert_array_equal(first.token_ids[:3], later.token_ids[3:])
    assert first.token_ids[3] == first.prompt_ids[0]


def test_a_batch_that_is_trained_on_again_stays_the_same_batch():
    redaction = Redaction(FACTS_OF_RUN)
    first, again, other = (
        redaction.record(full_record(step=step, seed=seed))
        for step, seed in ((1, 0), (2, 0), (3, 1))
    )
    np.testing.assert_array_equal(first.token_ids, again.token_ids)
    assert (first.token_ids != other.token_ids).any()


@pytest.mark.parametrize("size", [None, 12, 99])
def test_no_two_ids_become_one_in_a_small_vocabulary(size):
    everything = np.arange(-3, 15)
    record = replace(
        full_record(lengths=(18,)),
        prompt_ids=None,
        prompt_offsets=None,
        token_ids=everything,
    )
    after = Redaction({"eos_ids": [4, 20, -1], "vocabulary_size": size}).record(record)
    assert len(np.unique(after.token_ids)) == 18


def test_text_anywhere_is_left_out():
    record = replace(
        full_record(),
        finish_reason=np.array([CANARY, "stop", "length"]),
        reward_parts={CANARY: np.zeros(3)},
        facts={**dict.fromkeys(FACTS, CANARY), CANARY: 1.0},
        group=np.array([10**9 + 7, 10**9 + 7, 3]),
        sample=np.array([10**12, 10**12 + 1, 4]),
    )
    run = {
        name: {CANARY: CANARY, "name": CANARY, "dtype": CANARY, "torch": CANARY, "kind": CANARY}
        for name in RUN_KEYS
    }
    run |= dict.fromkeys(("trainer", "estimator", "advantage", "klinic", "created"), CANARY)
    redaction = Redaction({**run, CANARY: CANARY, "eos_ids": [CANARY, 3]})
    after = redaction.record(record)
    passed = [
        redaction.run_facts(),
        redact_metrics({"step": 1, CANARY: 1.0, **dict.fromkeys(METRICS, CANARY)}),
        *(redact_probe({"probe": name, "looks_like": CANARY, CANARY: 1}) for name in PROBES),
        [*after.facts.values(), *after.facts, *after.reward_parts, *after.finish_reason.tolist()],
    ]
    assert "canary" not in json.dumps(passed)
    assert redact_probe({"probe": CANARY}) is None
    assert after.group.tolist() == [1, 1, 0]
    assert after.sample.tolist() == [1, 2, 0]
    assert after.prompt_index is None


def test_fingerprints_are_compared_and_not_passed_on():
    facts = {"weights_published": "a1", "weights_loaded": "a1", "reference_fingerprint": "b2"}
    after = redacted(replace(full_record(), facts=facts)).facts
    assert after["weights_published"] == after["weights_loaded"] != after["reference_fingerprint"]
    assert {after[name] for name in facts} == {"00000001", "00000002"}
    assert set(FINGERPRINTS) <= set(FACTS)


def test_every_rule_is_for_a_documented_key():
    assert {*RUN_RULES, *ID_LISTS, "pad_id"} <= set(RUN_KEYS)
    assert set(RUN_KEYS) - {*RUN_RULES, *ID_LISTS, "pad_id", "schema"} == NEVER_PASSED


@pytest.mark.parametrize("version", ["2.13.0", "0.1.0.dev0", "2.9.1+cu128.ada", "1.0rc1"])
def test_a_version_loses_its_local_part(version):
    run = Redaction({"versions": {"torch": version, "ada": "1.0"}}).run_facts()
    assert list(run["versions"]) == ["torch"]
    assert version.startswith(run["versions"]["torch"])
    assert "ada" not in run["versions"]["torch"]
