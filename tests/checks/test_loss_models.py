"""The signs of a loss are found in its recorded values, and never in a loss of another form."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from klinic.checks import (
    Case,
    Verdict,
    entropy_term_wrong,
    kl_not_applied,
    kl_sign_flipped,
    policy_gradient_wrong,
    ratio_not_applied,
)
from klinic.checks.loss_models import Sign, identify_loss
from klinic.checks.loss_values import LossMeasure
from klinic.evidence.record import StepRecord
from klinic.maths.kl_estimators import kl_term
from klinic.maths.kl_inputs import KLInputs
from klinic.maths.masked import aggregation_weights, weighted_sum
from klinic.maths.surrogate import SURROGATES, PolicyInputs

GROUPS, GROUP = 6, 4
ROWS = GROUPS * GROUP
CHECKS = {
    "policy": policy_gradient_wrong.CHECK,
    "kl": kl_sign_flipped.CHECK,
    "no kl": kl_not_applied.CHECK,
    "entropy": entropy_term_wrong.CHECK,
}
LOSSES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo")
ESTIMATORS = ("k1", "k2", "k3", "unbiased", "k3_plus", "k3_ratio", "k1_reward", "abs")
"""Those whose value is that of their name; exact and topk need the vocabulary."""


def made_step(number, random, *, moved, apart, **made):
    """Return a step whose loss has factors `p`, `a` and `b` at its terms, in float32."""
    lengths = random.integers(1, 9, size=ROWS)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    num = int(offsets[-1])
    mask = random.random(num) < 0.9
    mask[offsets[:-1]] = True
    old = -random.exponential(1.0, size=num) - 0.01
    logp = old + moved * random.normal(size=num)
    ref = logp + apart * number / 5 * random.normal(size=num)
    reward = random.choice([0.0, 0.5, 1.0], size=ROWS)
    advantage = reward.reshape(GROUPS, GROUP) - reward.reshape(GROUPS, GROUP).mean(1)[:, None]
    columns = {
        "logp": logp,
        "logp_old": old,
        "logp_ref": ref,
        "logp_sampler": old,
        "entropy": random.random(num) + 0.5,
    }
    columns = {name: x.astype(np.float32) for name, x in columns.items()}
    record = StepRecord(
        step=number,
        group=np.repeat(np.arange(GROUPS), GROUP),
        row_offsets=offsets,
        token_ids=np.zeros(num, np.int64),
        loss_mask=mask,
        reward=reward,
        advantage=advantage.ravel().astype(np.float32),
        **columns,
    )
    facts = {"kl_coef": made["kl_coef"], "entropy_coef": made["entropy_coef"]}
    facts["loss"] = float(np.float32(loss_of(record, **made)))
    return replace(record, facts=facts)


def loss_of(record, *, loss, estimator, kl_coef, entropy_coef, **factors):
    """Return the loss by the formulas of `maths`, with the factors of a fault."""
    p, a, b, scale = (factors.get(name, 1.0) for name in ("p", "a", "b", "scale"))
    surrogate = SURROGATES[loss]
    columns = ("logp", "logp_old", "logp_ref", "logp_sampler", "entropy")
    token = {name: np.asarray(getattr(record, name), np.float64) for name in columns}
    entropy = token.pop("entropy")
    shared = {"row_offsets": record.row_offsets, "loss_mask": record.loss_mask}
    inputs = PolicyInputs(
        advantage=np.asarray(record.advantage, np.float64),
        logp=token["logp"],
        logp_old=token["logp" if factors.get("drops_old") else "logp_old"],
        **shared,
    )
    weights = aggregation_weights(surrogate.aggregation, **shared, length=8, dtype=np.float64)
    kl_inputs = KLInputs(group=record.group, **token, **shared)
    kl = kl_term(estimator, kl_inputs, aggregation=surrogate.aggregation)
    terms = p * surrogate.term(inputs) + a * kl_coef * kl - b * entropy_coef * entropy
    return scale * weighted_sum(terms, weights)


def cases(seed=0, *, steps=10, moved=0.1, apart=0.2, run=None, **made):
    """Return the cases of a run."""
    random = np.random.default_rng(seed)
    settings = {"loss": "dapo", "estimator": "k3", "kl_coef": 0.05, "entropy_coef": 0.0, **made}
    records = [
        made_step(n, random, moved=moved, apart=apart, **settings) for n in range(1, steps + 1)
    ]
    return [
        Case(record=record, earlier=tuple(records[:n]), start=records[0], run=run or {})
        for n, record in enumerate(records)
    ]


def failures(found):
    """Return the checks that fail after 4, 6, 8 and 10 steps of a run."""
    return {
        name
        for name, check in CHECKS.items()
        if any(check(case).verdict is Verdict.FAIL for case in found[3::2])
    }


FAULTS = {
    "well": ({}, set()),
    "policy negated": ({"p": -1.0}, {"policy"}),
    "no policy": ({"p": 0.0}, {"policy"}),
    "kl negated": ({"a": -1.0}, {"kl"}),
    "no kl": ({"a": 0.0}, {"no kl"}),
    "all negated": ({"p": -1.0, "a": -1.0}, {"policy"}),
    "half": ({"scale": 0.5}, set()),
    "kl negated, half": ({"a": -1.0, "scale": 0.5}, {"kl"}),
}


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_ratio"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_right_check_fails_for_every_aggregation_ratio_and_estimator(fault, loss, estimator):
    changes, wanted = FAULTS[fault]
    run = {"loss": {"name": loss, "clip_low": 0.2, "clip_high": 0.2}}
    assert failures(cases(run=run, loss=loss, estimator=estimator, **changes)) == wanted


@pytest.mark.parametrize(("b", "wanted"), [(1.0, set()), (-1.0, {"entropy"})])
def test_a_bonus_on_the_wrong_side(b, wanted):
    for loss in LOSSES:
        assert failures(cases(loss=loss, entropy_coef=0.02, b=b)) == wanted


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(FAULTS)),
    st.booleans(),
    st.fixed_dictionaries(
        {
            "seed": st.integers(0, 10**6),
            "loss": st.sampled_from(LOSSES),
            "estimator": st.sampled_from(ESTIMATORS),
            "moved": st.sampled_from([0.0, 1e-3, 0.1, 0.5]),
            "apart": st.sampled_from([1e-6, 1e-3, 0.1, 1.0]),
            "kl_coef": st.sampled_from([1e-6, 1e-3, 0.05, 0.5]),
            "entropy_coef": st.sampled_from([0.0, 0.01]),
        }
    ),
)
def test_the_right_check_fails_or_none(fault, is_stated, made):
    changes, wanted = FAULTS[fault]
    if fault == "all negated":  # a KL with the wrong sign too: with a ratio of 1 it alone is seen
        wanted = {"policy", "kl"}
    stated = {"estimator": made["estimator"], "loss": {"name": made["loss"], "clip_low": 0.2}}
    assert failures(cases(run=stated if is_stated else None, **made, **changes)) <= wanted


def without_reference(case):
    """Return the case of a loop that has no reference and states no coefficient of a KL."""

    def of(record):
        facts = {name: value for name, value in record.facts.items() if name != "kl_coef"}
        return replace(record, logp_ref=None, facts=facts)

    earlier = tuple(of(record) for record in case.earlier)
    return replace(case, record=of(case.record), earlier=earlier, start=earlier[0])


def test_a_loop_without_a_reference_has_no_kl_term():
    found = cases(kl_coef=0.0, entropy_coef=0.02, b=-1.0)
    assert failures([without_reference(case) if case.earlier else case for case in found]) == {
        "entropy"
    }


def test_three_steps_decide_one_term_and_two_do_not():
    found = cases(kl_coef=0.0, p=-1.0)
    verdicts = [policy_gradient_wrong.CHECK(case).verdict for case in found]
    assert verdicts == [Verdict.NO_DATA] * 2 + [Verdict.FAIL] * 8


def test_on_policy_the_policy_term_of_centred_advantages_is_not_identified():
    found = cases(loss="grpo", moved=0.0, p=-1.0)
    assert identify_loss(found[-1]).signs == {"kl": Sign.RIGHT}
    assert failures(found) == set()


def test_a_kl_below_the_rounding_of_the_loss_is_not_identified():
    fit = identify_loss(cases(kl_coef=1e-7, a=-1.0)[-1])
    assert fit.signs == {"policy": Sign.RIGHT}


@pytest.mark.parametrize("digits", [2, 3, 4])
def test_a_rounded_loss_claims_less(digits):
    found = cases(apart=0.02, a=0.0)
    rounded = [
        replace(r, facts={**r.facts, "loss": round(r.facts["loss"], digits)})
        for r in found[-1].recent_records
    ]
    case = replace(found[-1], record=rounded[-1], earlier=tuple(rounded[:-1]))
    assert kl_not_applied.CHECK(case).verdict is Verdict.NO_DATA


def test_a_loss_of_another_form_shows_nothing():
    found = cases(a=-1.0)
    other = [
        replace(r, facts={**r.facts, "loss": r.facts["loss"] + 0.01 * np.cos(r.step)})
        for r in found[-1].recent_records
    ]
    case = replace(found[-1], record=other[-1], earlier=tuple(other[:-1]))
    assert identify_loss(case) is None


def test_a_value_of_the_right_sign_is_no_pass_as_it_may_be_detached():
    case = cases()[-1]
    assert identify_loss(case).signs == {"policy": Sign.RIGHT, "kl": Sign.RIGHT}
    for check in (policy_gradient_wrong, kl_sign_flipped, kl_not_applied):
        assert check.CHECK(case).verdict is Verdict.NO_DATA


def test_a_kl_in_the_rewards_is_not_missing_in_the_loss():
    found = cases(a=0.0, estimator="k3")
    assert kl_not_applied.CHECK(found[-1]).verdict is Verdict.FAIL
    stated = replace(found[-1], run={"estimator": "k1_reward"})
    assert kl_not_applied.CHECK(stated).verdict is Verdict.NO_DATA
    penalty = np.linspace(0, 0.1, ROWS)
    for name in ("reward", "advantage"):
        column = getattr(found[-1].record, name)
        record = replace(found[-1].record, **{name: (column - penalty).astype(column.dtype)})
        shown = replace(found[-1], record=record)
        assert kl_not_applied.CHECK(shown).verdict is Verdict.NO_DATA


def test_what_the_run_states_decides_between_forms_that_fit():
    # without a policy term, a loss of advantages that sum to 0 fits as well
    made = {"loss": "grpo", "p": 0.0}
    assert identify_loss(cases(**made)[-1]).signs == {"kl": Sign.RIGHT}
    run = {"loss": {"name": "grpo", "clip_low": 0.2, "clip_high": 0.2}}
    signs = identify_loss(cases(run=run, **made)[-1]).signs
    assert signs == {"policy": Sign.ABSENT, "kl": Sign.RIGHT}
    # unless the ratio is rounding: the loss may take it as 1
    on_policy = cases(run=run, moved=1e-3, **made)[-1]
    assert identify_loss(on_policy).signs == {"kl": Sign.RIGHT}


def test_what_the_run_states_and_does_not_do_decides_nothing():
    run = {"estimator": "k2", "loss": {"name": "gspo", "clip_low": 0.2}}
    fit = identify_loss(cases(run=run, a=-1.0)[-1])
    assert fit.signs == {"policy": Sign.RIGHT, "kl": Sign.WRONG}
    assert "k3" in fit.description


def test_a_step_with_another_reward_scale_is_left_out():
    found = cases(p=-1.0)
    metrics = {case.record.step: {"reward_scale": 0.5} for case in found}
    case = replace(found[-1], metrics=metrics)
    assert identify_loss(case) is None


def test_a_fault_that_begins_in_the_middle_is_found():
    well, sick = cases(steps=24), cases(steps=24, a=-1.0)
    records = [*(c.record for c in well[:12]), *(c.record for c in sick[12:])]
    verdicts = [
        kl_sign_flipped.CHECK(Case(record=r, earlier=tuple(records[:n]))).verdict
        for n, r in enumerate(records)
    ]
    assert Verdict.FAIL not in verdicts[:12]
    assert verdicts[-1] is Verdict.FAIL


def test_a_declared_weight_against_the_sampler_multiplies_the_policy_term():
    record = cases(apart=0.2)[-1].record
    sampler = record.logp_old - 1.0
    record = replace(record, logp_sampler=sampler)
    plain, weighted = (
        LossMeasure(clip_range=None, importance_cap=cap)(record) for cap in (None, 2.0)
    )
    for name, value in plain.policy.items():
        assert weighted.policy[name] == pytest.approx(2.0 * value)
    assert weighted.kl == plain.kl


def updated(case, **run):
    """Return a case whose rows were sampled before its last update."""
    version = np.zeros(case.record.num_tokens, np.int64)
    record = replace(case.record, weight_version=version)
    return replace(case, record=record, run={**case.run, "updates_per_generation": 4, **run})


@pytest.mark.parametrize("loss", ["dapo", "dr_grpo"])  # by rows, advantages sum to 0
def test_a_loss_that_drops_the_old_log_probs_has_a_ratio_of_1(loss):
    run = {"loss": {"name": loss, "clip_low": 0.2, "clip_high": 0.2}}
    dropped = cases(loss=loss, run=run, drops_old=True)[-1]
    assert identify_loss(dropped).ratio_is_1
    finding = ratio_not_applied.CHECK(updated(dropped))
    assert finding.verdict is Verdict.FAIL
    assert "does not use `logp_old`" in finding.summary
    overridden = {"loss": {"overridden": True}}
    assert ratio_not_applied.CHECK(updated(dropped, **overridden)).verdict is Verdict.FAIL


@settings(max_examples=5, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "seed": st.integers(0, 10**6),
            "loss": st.sampled_from(LOSSES),
            "estimator": st.sampled_from(ESTIMATORS),
            "moved": st.sampled_from([1e-3, 0.03, 0.1, 0.5]),
            "kl_coef": st.sampled_from([0.0, 1e-3, 0.05, 0.5]),
            "scale": st.sampled_from([0.25, 1.0]),
        }
    ),
)
def test_a_loss_with_its_ratio_never_has_a_ratio_of_1(made):
    for run in ({"loss": {"overridden": True}}, {"loss": {"name": made["loss"]}}):
        case = cases(run=run, **made)[-1]
        assert ratio_not_applied.CHECK(updated(case)).verdict is not Verdict.FAIL


def test_a_ratio_of_1_is_right_on_policy():
    dropped = cases(moved=1e-3, drops_old=True)[-1]
    assert ratio_not_applied.CHECK(updated(dropped)).verdict is not Verdict.FAIL
    # one update on every generation: what differs are the kernels that scored twice
    once = {"updates_per_generation": 1, "sampler": {"max_version_lag": 0}}
    other = updated(cases(moved=0.05, drops_old=True)[-1], **once)
    assert ratio_not_applied.CHECK(other).verdict is not Verdict.FAIL
