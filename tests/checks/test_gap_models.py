"""Explanations of the gap between sampler and learner: the right one wins, and noise has none."""

from dataclasses import replace

import numpy as np
import pytest

from checks.exact_records import (
    LENGTH,
    ROWS,
    VOCABULARY,
    case,
    distributions,
    judged,
    log_softmax,
    record,
)
from klinic.checks import (
    Verdict,
    broken_sampler,
    hidden_sampling_transform,
    imprecise_logp,
    layout_changes_logp,
    misaligned_logp,
    prompt_mismatch,
    temperature_on_one_side,
    unexplained_gap,
)
from klinic.checks.gap_models import GapCompetition, GapFit, GapModel, compete_on_sampler_gap

PASS, FAIL = Verdict.PASS, Verdict.FAIL
PICK = np.arange(ROWS * LENGTH)
SIMILAR = (hidden_sampling_transform, imprecise_logp, misaligned_logp, temperature_on_one_side)


def sharp(seed=0, width=8.0):
    """Return log-probs of a policy that is certain of most tokens."""
    return log_softmax(width * np.random.default_rng(seed).normal(size=(len(PICK), VOCABULARY)))


def scored(learner, sampler, seed=0, ids=None):
    """Return tokens that a sampler drew, with the log-probs of both sides."""
    random = np.random.default_rng(seed)
    if ids is None:
        ids = np.array([random.choice(VOCABULARY, p=np.exp(row)) for row in sampler])
    old = learner[PICK, ids]
    return record(
        token_ids=ids,
        logp=old,
        logp_old=old,
        logp_ref=old,
        logp_sampler=sampler[PICK, ids],
        entropy=-(np.exp(learner) * learner).sum(-1),
    )


def winner(found):
    fit = compete_on_sampler_gap(found).winner
    return None if fit is None else fit.model


def failing(found, checks=SIMILAR, **more):
    return [c.CHECK.name for c in checks if judged(c, found, **more) is FAIL]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [1e-6, 0.03, 0.3])
def test_noise_is_explained_by_nothing(seed, noise):
    prompts = np.arange(ROWS * 4) % VOCABULARY
    found = record(seed, noise=noise, prompt_ids=prompts, prompt_offsets=np.arange(ROWS + 1) * 4)
    assert winner(found) is None


@pytest.mark.parametrize("seed", range(4))
def test_an_end_token_that_is_forbidden_at_first_raises_nearly_all_and_is_no_temperature(seed):
    """A least length of all tokens but the last: the policy would have ended long before."""
    random, end, is_last = np.random.default_rng(seed), 0, PICK % LENGTH == LENGTH - 1
    learner = sharp(seed, width=2.0)
    learner[:, end] = learner.max(axis=-1) + 2.0 + random.random(len(PICK))
    learner = log_softmax(learner)
    sampler = learner.copy()
    sampler[~is_last, end] = -np.inf
    sampler = log_softmax(sampler)
    ids = np.array([random.choice(VOCABULARY, p=np.exp(row)) for row in sampler])
    ids[is_last] = end
    found = scored(learner, sampler, ids=ids)
    assert winner(found) is GapModel.SUPPRESSION
    assert failing(found) == ["hidden-sampling-transform"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.4])
def test_a_temperature_of_a_sharp_policy_raises_most_tokens_and_is_no_truncation(seed, temperature):
    learner = sharp(seed, width=5.0)
    found = scored(learner, log_softmax(learner / temperature), seed)
    assert failing(found) == ["temperature-on-one-side"]


def test_divided_log_probs_are_a_temperature():
    found = record()
    assert winner(replace(found, logp_sampler=found.logp_old / 0.8)) is not GapModel.TRUNCATION
    both_ways = scored(distributions(), log_softmax(distributions() / 0.8))
    assert winner(both_ways) is GapModel.TEMPERATURE


def off_by_one(learner):
    """Return the distributions of the next position of each row."""
    by_row = learner.reshape(ROWS, LENGTH, VOCABULARY)
    return np.roll(by_row, -1, axis=1).reshape(-1, VOCABULARY)


@pytest.mark.parametrize("seed", range(4))
def test_logits_that_are_not_shifted_are_misaligned_and_no_truncation(seed):
    right = sharp(seed)
    found = scored(off_by_one(right), right, seed)
    assert failing(found) == ["misaligned-logp"]
    assert judged(broken_sampler, found) is PASS


def test_a_gap_that_was_absent_in_the_first_step_is_no_wrong_position():
    right = sharp(0)
    start, later = scored(right, right, 0), scored(off_by_one(right), right, 0)
    later = replace(later, step=start.step + 5)
    at_once = case(later)
    assert misaligned_logp.CHECK(replace(at_once, start=start)).verdict is PASS
    assert misaligned_logp.CHECK(replace(at_once, start=None)).verdict is FAIL


@pytest.mark.parametrize("column", ["logp_old", "logp_sampler"])
def test_log_probs_of_the_next_id_are_misaligned(column):
    random = np.random.default_rng(0)
    right = sharp()
    ids = np.array([random.choice(VOCABULARY, p=np.exp(row)) for row in right])
    by_row = ids.reshape(ROWS, LENGTH)
    right[PICK[1::LENGTH], by_row[:, 0]] = 20.0  # each row begins with a token twice
    right = log_softmax(right)
    by_row[:, 1] = by_row[:, 0]
    found = scored(right, right, ids=by_row.reshape(-1))
    following = np.roll(by_row, -1, axis=1).reshape(-1)
    shifted = replace(found, **{column: right[PICK, following]})
    assert failing(shifted) == ["misaligned-logp"]
    assert failing(found) == []


def copied(found, num):
    """Return the record with groups of equal rows, `num` copies of each."""
    copies = np.repeat(np.arange(ROWS // num), num)
    tokens = (copies[:, None] * LENGTH + np.arange(LENGTH)).ravel()
    columns = ("token_ids", "logp_sampler", "logp_old", "entropy")
    columns = {name: getattr(found, name)[tokens] for name in columns}
    return replace(found, group=copies, **columns), copies


def test_one_place_in_copies_of_a_row_proves_no_neighbouring_ids():
    found, copies = copied(record(), 12)
    place = np.arange(found.num_tokens) % LENGTH
    is_equal = (place == 5) & np.repeat(copies == 0, LENGTH)
    ids = found.token_ids.copy()
    ids[is_equal] = ids[np.flatnonzero(is_equal) - 1]
    lift = np.where(is_equal, 0.0, 3.0 + 0.01 * place)
    found = replace(found, token_ids=ids, logp_old=found.logp_sampler - lift)
    assert winner(found) is not GapModel.SHIFTED_IDS


def test_a_large_surprise_of_few_groups_is_no_truncation():
    """Eight groups of three copies: half of them far from the learner, and half near it."""
    found, copies = copied(record(), 3)
    lift = np.repeat(np.where(copies % 2, 4.0, 0.2), LENGTH)
    found = replace(found, logp_old=found.logp_sampler - lift, entropy=-found.logp_sampler)
    assert winner(found) is not GapModel.TRUNCATION


def with_prompts(found, lengths):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return replace(found, prompt_ids=np.arange(offsets[-1]) % VOCABULARY, prompt_offsets=offsets)


def test_a_gap_on_the_rows_that_a_batch_pads_is_one_of_layout():
    lengths = np.where(np.arange(ROWS) % 3, 4, 6)
    padded = np.repeat(lengths < 6, LENGTH)
    learner = distributions()
    other = np.where(padded[:, None], distributions(7), learner)
    found = with_prompts(scored(learner, other), lengths)
    answer = {"rescore_alone": {"largest": 0.0}}
    assert judged(layout_changes_logp, found, answers=answer) is FAIL
    assert failing(found) == []
    assert judged(layout_changes_logp, with_prompts(record(), lengths), answers=answer) is PASS
    elsewhere = with_prompts(found, np.random.default_rng(1).permutation(lengths))
    assert judged(layout_changes_logp, elsewhere, answers=answer) is PASS


def test_a_gap_of_one_row_among_the_padded_ones_is_not_one_of_layout():
    lengths = np.where(np.arange(ROWS) % 3, 4, 6)
    found = with_prompts(record(), lengths)
    gap = np.zeros(found.num_tokens)
    gap[LENGTH : 2 * LENGTH] = np.random.default_rng(0).normal(size=LENGTH)
    one_row = replace(found, logp_sampler=found.logp_old + gap)
    answer = {"rescore_alone": {"largest": 0.0}}
    assert judged(layout_changes_logp, one_row, answers=answer) is PASS


def test_layout_cannot_pass_without_its_probe():
    assert judged(layout_changes_logp, record()) is Verdict.NO_DATA


def test_unrelated_log_probs_are_no_rounding():
    found = record()
    other = np.random.default_rng(1).permutation(found.logp_old)
    unrelated = replace(found, logp_sampler=other)
    assert judged(imprecise_logp, unrelated) is PASS
    assert winner(unrelated) is None


def test_later_positions_win_only_if_the_first_ones_agree():
    length, rows = 60, 4
    found = replace(
        record(),
        row_offsets=np.arange(rows + 1) * length,
        **{name: getattr(record(), name)[:rows] for name in ROW_NAMES},
    )
    position = np.tile(np.arange(length), rows)
    noise = np.random.default_rng(0).normal(size=found.num_tokens)
    grows = replace(found, logp_sampler=found.logp_old + 0.4 * (position / length) ** 3 * noise)
    assert winner(grows) is GapModel.POSITION
    assert winner(replace(found, logp_sampler=found.logp_old + 0.4 * noise)) is None


ROW_NAMES = (
    *("group", "sample", "finish_reason", "reward", "advantage"),
    *("cached_tokens", "prompt_ids_match", "round_trip"),
)


def test_one_competition_serves_all_checks_of_a_step():
    found = record(noise=0.2)
    step = case(found)
    for check in SIMILAR:
        check.CHECK(step)
    assert (compete_on_sampler_gap, id(found)) in step.measure_cache


def another_network(found, rows, seed=3):
    """Return the record with the sampler's log-probs of another policy in some rows."""
    other = distributions(seed + 50)[PICK, found.token_ids]
    here = np.repeat(rows, LENGTH)
    return replace(found, logp_sampler=np.where(here, other, found.logp_old))


def test_a_gap_that_nothing_explains_is_never_a_pass():
    some_rows = np.random.default_rng(4).random(ROWS) < 0.4
    found = another_network(record(), some_rows)
    finding = unexplained_gap.CHECK(case(found, start=found))
    assert finding.verdict is FAIL
    assert "its shape" in finding.summary
    assert failing(found) == []


@pytest.mark.parametrize("noise", [0.0, 1e-4, 0.03])
def test_rounding_is_no_unexplained_gap(noise):
    found = record(noise=noise)
    assert judged(unexplained_gap, found) is PASS
    assert judged(unexplained_gap, found, run={"sampler": {"dtype": "fp32"}}) is PASS


def test_an_explained_gap_is_not_unexplained():
    learner = distributions()
    for found in (
        scored(learner, log_softmax(learner / 0.6)),
        record(noise=0.2),
        scored(off_by_one(sharp()), sharp()),
    ):
        assert judged(unexplained_gap, found) is PASS


def test_tokens_of_older_weights_may_differ():
    found = another_network(record(version=3), np.random.default_rng(4).random(ROWS) < 0.4)
    assert judged(unexplained_gap, found, start=found) is FAIL
    older = replace(found, weight_version=np.full(found.num_tokens, 2))
    assert judged(unexplained_gap, older, start=found) is PASS
    since_then = judged(unexplained_gap, found, start=record(noise=1e-4))
    assert since_then is PASS


def test_a_smaller_gap_counts_where_both_sides_compute_in_fp32():
    found = record()
    spikes = np.where(PICK % 40 == 7, 1.5, 0.0)
    spiked = replace(found, logp_sampler=found.logp_old - spikes)
    both = {"policy": {"dtype": "fp32"}, "sampler": {"dtype": "fp32"}}
    assert judged(unexplained_gap, spiked, run=both) is FAIL
    assert judged(unexplained_gap, spiked, run={"sampler": {"dtype": "bf16"}}) is PASS


def with_turns(gap, **columns):
    """Return rows of two turns with a reply between them, and a gap after it."""
    by_row = np.tile(np.arange(LENGTH), ROWS)
    found = record(**columns)
    emitted_by = np.isin(by_row, (4, 5)).astype(np.int8)
    return replace(
        found,
        emitted_by=emitted_by,
        loss_mask=emitted_by == 0,
        logp_sampler=found.logp_old + np.where(by_row > 5, gap, 0.0),
    )


def test_a_gap_that_begins_with_a_reply_is_another_history_of_later_turns():
    gap = np.random.default_rng(5).normal(size=ROWS * LENGTH)
    first = with_turns(0.1 * gap)
    later = replace(with_turns(0.1 * gap, version=3), step=4)
    assert winner(first) is GapModel.TURNS
    assert judged(prompt_mismatch, first) is FAIL
    assert judged(prompt_mismatch, later, start=first) is FAIL
    assert judged(prompt_mismatch, later, start=with_turns(0 * gap)) is PASS  # an old cache
    assert judged(prompt_mismatch, replace(first, prompt_ids_match=None)) is FAIL
    for other in (unexplained_gap, *SIMILAR):
        assert judged(other, first) is PASS, other


@pytest.mark.parametrize("everywhere", [0.02, 0.1])
def test_a_gap_of_first_turns_too_is_no_other_history(everywhere):
    noise, gap = np.random.default_rng(6).normal(size=(2, ROWS * LENGTH))
    turns = with_turns(0.1 * gap)
    both = replace(turns, logp_sampler=turns.logp_sampler + everywhere * 3 * noise)
    assert judged(prompt_mismatch, both) is PASS
    assert judged(prompt_mismatch, with_turns(0.01 * gap)) is PASS


def test_two_explanations_of_one_gap_leave_it_open_which_is_at_work():
    fits = (
        GapFit(model=GapModel.TEMPERATURE, explained=0.97),
        GapFit(model=GapModel.SHIFTED_COLUMN, explained=0.9),
        GapFit(model=GapModel.TRUNCATION, explained=0.8),  # below its limit
    )
    one, two = (
        GapCompetition(num_tokens=100, size=1.0, fits=fits[:1] + rest)
        for rest in (fits[2:], fits[1:])
    )
    assert one.beyond_others(GapModel.TEMPERATURE, 0.97) == pytest.approx(0.97)
    assert two.beyond_others(GapModel.TEMPERATURE, 0.97) == pytest.approx(0.07)


def test_a_form_that_predicts_no_token_explains_no_fraction():
    """Tokens that surprise the learner fit unshifted logits, and a learner that reads padding."""
    right = sharp(0)
    finding = misaligned_logp.CHECK(case(scored(off_by_one(right), right, 0)))
    assert (finding.verdict, finding.explained) == (FAIL, 0.0)
