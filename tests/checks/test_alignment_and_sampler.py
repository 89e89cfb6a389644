"""Checks of alignment and sampler, by records made for them."""

from dataclasses import replace

import numpy as np
import pytest

from klinic.checks import (
    Case,
    Verdict,
    context_truncated,
    misaligned_logp,
    stop_token_fault,
    temperature_on_one_side,
    wrong_loss_mask,
)
from klinic.doctor.cases import CaseBuilder
from klinic.doctor.diagnosis import diagnose
from klinic.evidence.record import EmittedBy, StepRecord

ROWS, LENGTH, VOCABULARY = 24, 10, 32
RUN = {"eos_ids": [1]}


def record(seed=0, temperature=1.0, sampler_temperature=1.0, noise=0.0):
    """Return completions of a policy with known logits: everything about them is exact."""
    random = np.random.default_rng(seed)
    num = ROWS * LENGTH
    logits = 2 * random.normal(size=(num, VOCABULARY))
    logp = log_softmax(logits / temperature)
    ids = np.array([random.choice(VOCABULARY, p=np.exp(row)) for row in logp])
    picked = np.arange(num), ids
    old = logp[picked]
    sampler = log_softmax(logits / sampler_temperature)[picked]
    finish = np.array(["stop"] * ROWS, "<U6")
    ids[ids == 1] = 2
    ids[LENGTH - 1 :: LENGTH] = 1
    return StepRecord(
        step=1,
        row_offsets=np.arange(ROWS + 1) * LENGTH,
        group=np.repeat(np.arange(ROWS // 4), 4),
        token_ids=ids,
        loss_mask=np.ones(num, bool),
        emitted_by=np.zeros(num, np.int8),
        finish_reason=finish,
        logp=old,
        logp_old=old,
        logp_ref=old,
        logp_sampler=sampler + noise * random.normal(size=num),
        entropy=-(np.exp(logp) * logp).sum(-1),
        facts={"learner_version": 0},
    )


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def verdict(check, found, **run):
    return check.CHECK(Case(record=found, run={**RUN, **run})).verdict


EVERY = (misaligned_logp, stop_token_fault, temperature_on_one_side, wrong_loss_mask)


@pytest.mark.parametrize("check", EVERY, ids=lambda check: check.CHECK.name)
@pytest.mark.parametrize("noise", [0.0, 0.03, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_record_passes_with_the_noise_of_bf16_and_more(check, noise, seed):
    assert verdict(check, record(seed, noise=noise)) is Verdict.PASS


@pytest.mark.parametrize("sampler", [0.6, 0.7, 0.9, 1.2, 1.5])
def test_a_temperature_on_one_side_is_a_line(sampler):
    found = record(sampler_temperature=sampler)
    assert verdict(temperature_on_one_side, found) is Verdict.FAIL
    assert verdict(misaligned_logp, found) is Verdict.PASS


def test_the_reference_s_temperature_is_looked_at_before_the_first_update_only():
    found = record(sampler_temperature=0.7)
    at_start = replace(found, logp_ref=found.logp_sampler, logp_sampler=found.logp_old)
    assert verdict(temperature_on_one_side, at_start) is Verdict.FAIL
    later = replace(at_start, facts={"learner_version": 5})
    assert verdict(temperature_on_one_side, later) is Verdict.PASS


def test_unrelated_log_probs_are_no_temperature():
    found = record()
    other = np.random.default_rng(1).permutation(found.logp_old)
    assert verdict(temperature_on_one_side, replace(found, logp_sampler=other)) is Verdict.PASS


@pytest.mark.parametrize("shift", [-2, -1, 1, 2])
@pytest.mark.parametrize("column", ["logp_sampler", "logp_ref"])
def test_a_shift_is_found_and_is_no_temperature(shift, column):
    found = record()
    rows = getattr(found, column).reshape(ROWS, LENGTH)
    moved = replace(found, **{column: np.roll(rows, shift, axis=1).reshape(-1)})
    assert verdict(misaligned_logp, moved) is Verdict.FAIL
    assert verdict(temperature_on_one_side, moved) is Verdict.PASS


@pytest.mark.parametrize("shift", [-2, -1, 1, 2])
def test_what_is_certain_fits_by_any_shift_and_says_nothing(shift):
    """A policy that has left its sampler at one token of a row, and is sure of all the others."""
    found = record()
    old = np.full(ROWS * LENGTH, -0.01)
    old[LENGTH - 1 if shift < 0 else 0 :: LENGTH] = -9.0
    apart = replace(found, logp_old=old, logp_sampler=np.full(ROWS * LENGTH, -0.02))
    assert verdict(misaligned_logp, apart) is Verdict.PASS


def test_log_probs_that_were_never_computed():
    found = record()
    logp = found.logp_sampler.copy()
    logp[np.argsort(logp)[:2]] = 0.0
    assert verdict(misaligned_logp, replace(found, logp_sampler=logp)) is Verdict.FAIL


def test_what_a_tool_said_has_no_log_prob_to_be_computed():
    found = record()
    logp, emitted = found.logp_sampler.copy(), found.emitted_by.copy()
    filled = np.argsort(logp)[:20]
    logp[filled], emitted[filled] = 0.0, EmittedBy.TOOL
    trained = replace(found, logp_sampler=logp, emitted_by=emitted)
    assert verdict(misaligned_logp, trained) is Verdict.PASS
    assert verdict(wrong_loss_mask, trained) is Verdict.FAIL


@pytest.mark.parametrize("who", [EmittedBy.TOOL, EmittedBy.TEMPLATE])
def test_a_trained_token_of_somebody_else(who):
    found = record()
    emitted = found.emitted_by.copy()
    emitted[5] = who
    assert verdict(wrong_loss_mask, replace(found, emitted_by=emitted)) is Verdict.FAIL
    mask = found.loss_mask.copy()
    mask[5] = False
    right = replace(found, emitted_by=emitted, loss_mask=mask)
    assert verdict(wrong_loss_mask, right) is Verdict.PASS


def test_a_row_that_is_left_out_as_a_whole_is_a_choice():
    found = record()
    mask = found.loss_mask.copy()
    mask[: 3 * LENGTH] = False
    assert verdict(wrong_loss_mask, replace(found, loss_mask=mask)) is Verdict.PASS
    mask[3 * LENGTH : 4 * LENGTH - 1] = False
    assert verdict(wrong_loss_mask, replace(found, loss_mask=mask)) is Verdict.FAIL


def test_a_lost_log_prob_is_not_the_mask_s_fault():
    found = record()
    logp = found.logp_sampler.copy()
    logp[3] = np.nan
    assert verdict(wrong_loss_mask, replace(found, logp_sampler=logp)) is Verdict.PASS


def test_ends_that_are_masked_are_the_stop_token_s_fault_alone():
    found = record()
    mask = found.loss_mask.copy()
    mask[LENGTH - 1 :: LENGTH] = False
    masked = replace(found, loss_mask=mask)
    assert verdict(stop_token_fault, masked) is Verdict.FAIL
    assert verdict(wrong_loss_mask, masked) is Verdict.PASS


def test_an_end_inside_a_row_and_an_end_that_counts_as_cut_off():
    found = record()
    ids = found.token_ids.copy()
    ids[3] = 1
    assert verdict(stop_token_fault, replace(found, token_ids=ids)) is Verdict.FAIL
    reasons = found.finish_reason.copy()
    reasons[0] = "length"
    assert verdict(stop_token_fault, replace(found, finish_reason=reasons)) is Verdict.FAIL


def test_rows_that_are_cut_off_are_no_fault():
    found = record()
    ids = found.token_ids.copy()
    ids[LENGTH - 1 :: LENGTH] = 2
    cut = np.array(["length"] * ROWS, "<U6")
    case = replace(found, token_ids=ids, finish_reason=cut)
    assert verdict(stop_token_fault, case) is Verdict.NO_DATA


@pytest.mark.parametrize(
    ("is_masked", "said"), [(True, Verdict.PASS), (False, Verdict.FAIL)], ids=["masked", "trained"]
)
def test_a_turn_that_an_environment_answers_outside_the_loss_may_end(is_masked, said):
    found = record()
    ids, mask, emitted = found.token_ids.copy(), found.loss_mask.copy(), found.emitted_by.copy()
    ids[3] = 1
    emitted[4] = EmittedBy.TOOL
    mask[4] = not is_masked
    turns = replace(found, token_ids=ids, loss_mask=mask, emitted_by=emitted)
    assert verdict(stop_token_fault, turns) is said


def test_ends_of_turns_that_are_masked_are_the_stop_token_s_fault_alone():
    found = record()
    ids, mask, emitted = found.token_ids.copy(), found.loss_mask.copy(), found.emitted_by.copy()
    ids[1::LENGTH] = 1
    emitted[2::LENGTH] = EmittedBy.TOOL
    mask[1::LENGTH] = mask[2::LENGTH] = mask[LENGTH - 1 :: LENGTH] = False
    turns = replace(found, token_ids=ids, loss_mask=mask, emitted_by=emitted)
    assert verdict(stop_token_fault, turns) is Verdict.FAIL
    assert verdict(wrong_loss_mask, turns) is Verdict.PASS


@pytest.mark.parametrize("masked", ["rows", "turns"])
def test_masked_ends_of_rows_do_not_hide_among_trained_ends_of_turns(masked):
    found = record()
    ids, mask, emitted = found.token_ids.copy(), found.loss_mask.copy(), found.emitted_by.copy()
    for end in (1, 4):
        ids[end::LENGTH] = 1
        emitted[end + 1 :: LENGTH] = EmittedBy.TOOL
        mask[end + 1 :: LENGTH] = False
    if masked == "rows":  # 24 of 72 end tokens
        mask[LENGTH - 1 :: LENGTH] = False
    else:  # all 24 ends of turns; 24 rows end
        ids[4::LENGTH] = 2
        mask[1::LENGTH] = False
    turns = replace(found, token_ids=ids, loss_mask=mask, emitted_by=emitted)
    finding = stop_token_fault.CHECK.judge(CaseBuilder(RUN).next_case(turns, {}))
    assert finding.verdict is Verdict.FAIL
    assert f"100% of the end tokens of {masked} are not trained on" in finding.summary


END_OF_TURN = 7


def with_turns_that_end(num_rows, **changes):
    """Return rows that are cut off, of which some end a turn in their middle and go on."""
    found = record()
    ids = found.token_ids.copy()
    ids[ids == END_OF_TURN] = 2
    ids[LENGTH - 1 :: LENGTH] = 2
    ids[LENGTH // 2 :: LENGTH][:num_rows] = END_OF_TURN
    cut = np.array(["length"] * ROWS, "<U6")
    return replace(found, token_ids=ids, finish_reason=cut, **changes)


@pytest.mark.parametrize(
    ("rows", "said"), [(ROWS, Verdict.FAIL), (ROWS // 4, Verdict.FAIL), (1, Verdict.NO_DATA)]
)
def test_an_end_that_only_the_model_s_files_know_is_the_stop_token_s_fault(rows, said):
    found = with_turns_that_end(rows)
    assert verdict(stop_token_fault, found, declared_eos_ids=[1, END_OF_TURN]) is said
    assert verdict(stop_token_fault, found, declared_eos_ids=[1]) is Verdict.NO_DATA
    assert verdict(stop_token_fault, found) is Verdict.NO_DATA


def test_an_end_token_that_the_model_never_learned_is_the_stop_token_s_fault():
    found = with_turns_that_end(ROWS)
    unlearned = replace(found, token_ids=np.where(found.token_ids == 1, 2, found.token_ids))
    likely = {"end_like_ids": [1, END_OF_TURN]}
    assert verdict(stop_token_fault, unlearned, **likely) is Verdict.FAIL
    assert verdict(stop_token_fault, unlearned, end_like_ids=[1]) is Verdict.NO_DATA
    assert verdict(stop_token_fault, unlearned, end_like_ids=[]) is Verdict.NO_DATA
    # one row that ends as the trainer expects: the model knows that token, and uses the other too
    ids, reasons = unlearned.token_ids.copy(), unlearned.finish_reason.copy()
    ids[LENGTH - 1], reasons[0] = 1, "stop"
    learned = replace(unlearned, token_ids=ids, finish_reason=reasons)
    assert verdict(stop_token_fault, learned, **likely) is Verdict.NO_DATA


def test_a_turn_that_a_tool_answers_is_an_end_that_was_known():
    by_whom = np.zeros(ROWS * LENGTH, np.int8)
    by_whom[LENGTH // 2 + 1 :: LENGTH] = EmittedBy.TOOL
    found = with_turns_that_end(ROWS, emitted_by=by_whom)
    assert verdict(stop_token_fault, found, declared_eos_ids=[END_OF_TURN]) is Verdict.NO_DATA


def test_an_unknown_end_is_told_and_not_the_length_that_comes_of_it():
    run = {**RUN, "declared_eos_ids": [1, END_OF_TURN]}
    cases = CaseBuilder(run)
    steps = [replace(with_turns_that_end(ROWS), step=step) for step in (1, 2, 3)]
    checks = [stop_token_fault.CHECK, context_truncated.CHECK]
    found = diagnose([cases.next_case(one, {}) for one in steps], checks)
    assert [str(h.status) for h in found.hypotheses] == ["confirmed", "explained"]
    assert found.cause == "stop-token-fault"
    run["declared_eos_ids"] = [1]
    again = CaseBuilder(run)
    assert (
        diagnose([again.next_case(one, {}) for one in steps], checks).cause == "context-truncated"
    )
