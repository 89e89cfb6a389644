"""What a run does not declare: repeated completions, raw log-probs, lengths, other trainers."""

from dataclasses import replace

import numpy as np
import pytest
from exact_records import ROWS, RUN, distributions, log_softmax, record

from klinic.checks import (
    advantage_explodes,
    context_truncated,
    hidden_sampling_transform,
    moved_reference,
    policy_does_not_move,
    policy_gradient_wrong,
    ratio_not_applied,
    state_lost,
    stop_token_fault,
    temperature_on_one_side,
)
from klinic.checks.base import Case, Verdict
from klinic.checks.repeated_rows import repeated_difference


def scored(step, *, logp_ref, policy_moved=0.0):
    found = record(step=step, version=step - 1)
    prompts = np.repeat(np.arange(ROWS), 2)
    return replace(
        found,
        logp_old=found.logp_old + policy_moved,
        logp_ref=logp_ref,
        prompt_ids=prompts,
        prompt_offsets=2 * np.arange(ROWS + 1),
    )


def judged(check, *records, run=None):
    *earlier, now = records
    case = Case(record=now, run={**RUN, **(run or {})}, earlier=tuple(earlier), start=records[0])
    return check.judge_case(case).verdict


def test_rows_are_found_by_prompt_and_completion():
    base = record().logp_old
    then, now = scored(1, logp_ref=base), scored(2, logp_ref=base + 0.25)
    assert np.allclose(repeated_difference(now, [then], "logp_ref"), 0.25)
    other = replace(now, prompt_ids=now.prompt_ids + 1000)
    assert repeated_difference(other, [then], "logp_ref").size == 0
    assert (
        repeated_difference(
            replace(now, prompt_ids=None, prompt_offsets=None), [then], "logp_ref"
        ).size
        == 0
    )


@pytest.mark.parametrize(("change", "expected"), [(0.2, Verdict.FAIL), (0.01, Verdict.PASS)])
def test_a_reference_whose_log_probs_of_the_same_completions_change_has_moved(change, expected):
    base = record().logp_old
    noise = np.random.default_rng(0).normal(size=base.size)
    steps = [scored(n, logp_ref=base + 0.3 * noise + (n == 3) * change) for n in (1, 2, 3)]
    steps = [replace(s, facts={**s.facts, "weights_published": f"w{s.step}"}) for s in steps]
    assert judged(moved_reference, *steps) is expected


def test_a_reference_that_came_to_the_policy_is_no_lost_state():
    base = record().logp_old
    noise = np.random.default_rng(0).normal(size=base.size)
    away = [scored(n, logp_ref=base + 0.3 * noise) for n in (1, 2, 3, 4)]
    came = scored(5, logp_ref=base)
    back = scored(5, logp_ref=base + 0.3 * noise)
    assert judged(state_lost, *away, came) is Verdict.PASS
    published = away[0].facts["weights_published"]
    back = replace(back, logp_old=back.logp_ref)
    back = replace(back, facts={**back.facts, "weights_published": published})
    assert judged(state_lost, *away, back) is Verdict.FAIL


@pytest.mark.parametrize("is_at_start", [True, False])
def test_a_distance_that_vanishes_is_the_references_fault_unless_the_weights_are_those_of_the_start(
    is_at_start,
):
    base = record().logp_old
    noise = np.random.default_rng(0).normal(size=base.size)
    steps = [scored(n, logp_ref=base + 0.3 * noise) for n in (1, 2, 3, 4)]
    steps = [replace(s, token_ids=s.token_ids + s.step) for s in steps]  # no completion comes again
    steps.append(scored(5, logp_ref=base))
    weights = [{**s.facts, "weights_published": f"w{s.step}"} for s in steps]
    weights[-1]["weights_published"] = "w1" if is_at_start else "w5"
    steps = [replace(s, facts=facts) for s, facts in zip(steps, weights, strict=True)]
    found = {check: judged(check, *steps) for check in (moved_reference, state_lost)}
    guilty = state_lost if is_at_start else moved_reference
    assert found.pop(guilty) is Verdict.FAIL
    assert Verdict.FAIL not in found.values()


def renewed(*, restarts, before=0.15):
    """Return a case whose undeclared reference becomes the policy in this step."""
    base = record().logp_old
    noise = np.random.default_rng(0).normal(size=base.size)
    steps = [scored(n, logp_ref=base + 0.3 * noise * (n < 6)) for n in range(1, 7)]
    norms = [0.4, *np.linspace(2 * before, before, 4), 0.401 if restarts else before]
    facts = [{**s.facts, "weights_published": f"w{s.step}"} for s in steps]
    facts = [
        {**known, "update_norm": norm, "learning_rate": 2e-3 * n}
        for n, (known, norm) in enumerate(zip(facts, np.arange(1, 7) * norms, strict=True), start=1)
    ]
    *earlier, now = [replace(s, facts=f) for s, f in zip(steps, facts, strict=True)]
    run = {name: value for name, value in RUN.items() if name != "reference"}
    return Case(record=now, run=run, earlier=tuple(earlier), start=earlier[0])


def test_an_undeclared_reference_is_the_policy_after_a_resume():
    finding = moved_reference.CHECK(renewed(restarts=True))
    assert finding.verdict is Verdict.FAIL
    assert "the optimizer started again" in finding.summary
    # renewed on purpose
    assert moved_reference.CHECK(renewed(restarts=False)).verdict is Verdict.NO_DATA
    # an optimizer whose updates are all as long
    assert moved_reference.CHECK(renewed(restarts=True, before=0.39)).verdict is Verdict.NO_DATA


@pytest.mark.parametrize(
    ("every", "kept", "coef", "expected"),
    [
        (1, 0.05, 0.04, Verdict.FAIL),
        (1, 0.0, 0.04, Verdict.FAIL),
        (1, 0.05, 0.0, Verdict.PASS),
        (1, 0.99, 0.04, Verdict.PASS),
        (10, 0.0, 0.04, Verdict.PASS),
    ],
)
def test_a_reference_that_is_the_policy_of_the_step_before_ties_it_to_nothing(
    every, kept, coef, expected
):
    found = record()
    found = replace(found, facts={**found.facts, "kl_coef": coef})
    run = {"reference": {"sync_every": every, "ema": kept}}
    assert judged(moved_reference, found, run=run) is expected


@pytest.mark.parametrize(("mode", "expected"), [("raw", Verdict.PASS), ("processed", Verdict.FAIL)])
def test_declared_raw_log_probs_have_the_slope_of_the_temperature(mode, expected):
    temperature = 0.7
    raw = distributions()
    processed = log_softmax(raw / temperature)
    found = record(drawn_from=processed)
    picked = np.arange(found.num_tokens), found.token_ids
    found = replace(
        found,
        logp=processed[picked],
        logp_old=processed[picked],
        logp_ref=processed[picked],
        logp_sampler=raw[picked],
        entropy=-(np.exp(processed) * processed).sum(-1),
    )
    sampling = {**RUN["sampling"], "temperature": temperature}
    run = {"sampling": sampling, "logprob_mode": mode}
    assert judged(temperature_on_one_side, found, run=run) is expected


@pytest.mark.parametrize(("paid", "expected"), [(0.0, Verdict.FAIL), (0.3, Verdict.WARN)])
def test_answers_of_a_fixed_length_are_not_truncated(paid, expected):
    cut = np.array(["length"] * ROWS, "<U6")
    reward = (np.arange(ROWS) < paid * ROWS).astype(float)

    def step(number):
        found = record(step=number)
        ids = np.where(found.token_ids == 1, 2, found.token_ids)
        return replace(found, finish_reason=cut, token_ids=ids, reward=reward)

    assert judged(context_truncated, step(1), step(2), step(3)) is expected


@pytest.mark.parametrize(("masked", "expected"), [(0.4, Verdict.WARN), (1.0, Verdict.FAIL)])
def test_answers_of_a_fixed_length_that_are_masked_train_nothing(masked, expected):
    cut = np.array(["length"] * ROWS, "<U6")
    reward = (np.arange(ROWS) % 2).astype(float)

    def step(number):
        found = record(step=number)
        ids = np.where(found.token_ids == 1, 2, found.token_ids)
        mask = np.repeat(np.arange(ROWS) >= masked * ROWS, np.diff(found.row_offsets))
        return replace(found, finish_reason=cut, token_ids=ids, reward=reward, loss_mask=mask)

    assert judged(context_truncated, step(1), step(2), step(3)) is expected


def undeclared(check, found, *names):
    run = {name: value for name, value in RUN.items() if name not in names}
    return check.CHECK(Case(record=found, run=run)).verdict


def test_advantages_of_an_unknown_estimator_far_beyond_the_rewards_were_divided():
    found = record()
    huge = replace(found, advantage=1e3 * found.advantage)
    assert undeclared(advantage_explodes, huge, "advantage") is Verdict.FAIL
    assert undeclared(advantage_explodes, found, "advantage") is Verdict.NO_DATA
    scaled = replace(huge, reward=1e3 * found.reward)
    assert undeclared(advantage_explodes, scaled, "advantage") is Verdict.NO_DATA


def tie_broken(*, noise=1e-3, repeated=(0, 1), graded=False):
    """Groups that all fail or all pass, with noise on the rewards; few have a completion twice."""
    random = np.random.default_rng(3)
    found = record()
    ids = found.token_ids.reshape(ROWS, -1).copy()
    for group in repeated:
        ids[4 * group + 1] = ids[4 * group]
    reward = np.where(found.group % 2, 1.0, 0.0) + noise * random.random(ROWS)
    if graded:
        for group in repeated:
            reward[4 * group + 1] = reward[4 * group]
    centred = reward.reshape(-1, 4) - reward.reshape(-1, 4).mean(1, keepdims=True)
    advantage = (centred / (centred.std(1, ddof=1, keepdims=True) + 1e-6)).ravel()
    return replace(found, token_ids=ids.ravel(), reward=reward, advantage=advantage)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Verdict.FAIL),
        ({"graded": True}, Verdict.PASS),
        ({"repeated": ()}, Verdict.PASS),
        ({"noise": 0.0}, Verdict.PASS),
        ({"noise": 0.3}, Verdict.PASS),
    ],
)
def test_noise_that_breaks_ties_is_scaled_to_ordinary_advantages(given, expected):
    run = {"advantage": "group_std"}
    assert judged(advantage_explodes, tie_broken(**given), run=run) is expected


def test_truncation_is_found_without_the_settings_of_the_sampler():
    logp = distributions()
    kept = np.where(logp >= np.sort(logp, -1)[:, [-5]], logp, -np.inf)
    found = record(drawn_from=log_softmax(np.where(np.isinf(kept), -1e3, kept)))
    picked = np.arange(found.num_tokens), found.token_ids
    found = replace(
        found,
        **dict.fromkeys(("logp", "logp_old", "logp_ref"), logp[picked]),
        logp_sampler=log_softmax(np.where(np.isinf(kept), -1e3, kept))[picked],
    )
    assert undeclared(hidden_sampling_transform, found, "sampling") is Verdict.FAIL
    assert undeclared(hidden_sampling_transform, record(), "sampling") is Verdict.NO_DATA


@pytest.mark.parametrize(("num", "expected"), [(1, Verdict.PASS), (4, Verdict.FAIL)])
def test_a_token_that_ends_a_turn_may_be_a_plain_one_in_few_rows_with_turns(num, expected):
    found = record()
    ids = np.where(found.token_ids == 1, 2, found.token_ids).reshape(ROWS, -1)
    ids[:, -1] = 1
    ids[:num, 7] = 1
    source = np.zeros_like(ids)
    source[:, 2:5] = 1
    found = replace(
        found,
        token_ids=ids.ravel(),
        emitted_by=source.ravel().astype(np.int8),
        loss_mask=source.ravel() == 0,
    )
    assert judged(stop_token_fault, found) is expected
    alone = replace(found, emitted_by=np.zeros(ids.size, np.int8), loss_mask=source.ravel() == 0)
    assert judged(stop_token_fault, alone) is Verdict.FAIL


def test_a_negative_learning_rate_climbs_the_loss():
    found = record()
    down = replace(found, facts={**found.facts, "learning_rate": -1e-4})
    probe = {"policy_gradient": {"norm": 1.0, "expected_norm": 1.0, "cosine": 1.0}}
    for probes in ({}, probe):
        case = Case(record=down, run=RUN, probe_results=probes)
        assert policy_gradient_wrong.CHECK(case).verdict is Verdict.FAIL
    assert policy_gradient_wrong.CHECK(
        Case(record=found, run=RUN, probe_results=probe)
    ).verdict is (Verdict.PASS)


@pytest.mark.parametrize(("lag", "expected"), [(0, Verdict.FAIL), (2, Verdict.NO_DATA)])
def test_weights_are_published_twice_if_samplers_may_lag(lag, expected):
    facts = {"weights_published": "same", "learning_rate": 1e-3, "grad_norm": 1.0}
    steps = [record(step=n, version=n - 1) for n in (1, 2)]
    then, now = (replace(r, facts={**r.facts, **facts}) for r in steps)
    run = {**RUN, "sampler": {"max_version_lag": lag}}
    case = Case(record=now, earlier=(then,), start=then, run=run)
    assert policy_does_not_move.CHECK(case).verdict is expected


@pytest.mark.parametrize(("is_applied", "expected"), [(False, Verdict.FAIL), (True, Verdict.PASS)])
def test_the_ratio_of_shuffled_rows_is_compared_with_their_first_update(is_applied, expected):
    then = scored(1, logp_ref=record().logp_old)
    then = replace(then, weight_version=np.zeros(then.num_tokens, np.int64))
    order = np.random.default_rng(0).permutation(ROWS)
    tokens = np.arange(then.num_tokens).reshape(ROWS, -1)[order].ravel()
    prompts = then.prompt_ids.reshape(ROWS, 2)[order].ravel()
    columns = ("token_ids", "logp", "logp_old", "logp_ref", "logp_sampler", "entropy")
    now = replace(then, step=2, group=then.group[order], prompt_ids=prompts)
    now = replace(now, **{name: getattr(then, name)[tokens] for name in columns})
    moved = now.logp + 0.05 * np.random.default_rng(1).normal(size=now.num_tokens)
    now = replace(now, logp=moved, logp_old=now.logp_old if is_applied else moved)
    assert ratio_not_applied.CHECK(
        Case(record=now, earlier=(then,), start=then, run=RUN)
    ).verdict is (expected)


def test_a_hidden_transform_without_entropies_is_undecided_and_no_error():
    finding = hidden_sampling_transform.CHECK(Case(record=replace(record(), entropy=None), run=RUN))
    assert finding.verdict is Verdict.NO_DATA
    assert finding.summary == "not recorded: `record.entropy`"
