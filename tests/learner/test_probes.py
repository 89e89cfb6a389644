"""Questions to a learner: right answers from a learner that is right, and nothing moves."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from klinic.evidence.fields import PROBES
from klinic.learner import micro_batch_loss
from klinic.learner.probes import PROBED_ESTIMATORS
from tiny_policies import (
    batch_of,
    drifted_reference,
    learner_of,
    own_reference,
    rollouts,
    small_policy,
    weights,
)


@pytest.fixture(scope="module")
def made():
    return rollouts()


def asked(made, estimator="unbiased", *, by=0.05, lora_rank=None, size=5, **section):
    policy = small_policy(lora_rank=lora_rank, **section)
    if lora_rank is None:
        reference = drifted_reference(policy, by)
    else:
        reference = own_reference(policy, lora=True)
    learner = learner_of(policy, reference, micro_batch_size=size, estimator=estimator)
    return policy, learner.probe(batch_of(made), kl_coef=0.1)


@pytest.mark.parametrize("estimator", PROBED_ESTIMATORS)
def test_every_estimator_keeps_the_promise_of_its_name(made, estimator):
    _, answers = asked(made, estimator)
    answer = answers["kl_gradient"]
    assert answer["ratio"] == pytest.approx(1, abs=2e-3)
    assert answer["cosine"] == pytest.approx(1, abs=1e-5)
    assert answers.keys() <= PROBES.keys()


def test_a_learner_that_is_right_agrees_with_itself_alone_and_in_halves(made):
    _, answers = asked(made)
    assert answers["rescore"]["largest"] == 0
    assert answers["rescore_alone"]["largest"] < 1e-5
    assert answers["micro_batches"]["ratio"] == pytest.approx(1, abs=1e-5)
    assert answers["micro_batches"]["cosine"] == pytest.approx(1, abs=1e-6)
    assert answers["policy_gradient"]["ratio"] == pytest.approx(1, abs=1e-4)
    assert answers["policy_gradient"]["cosine"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(("factor", "cosine"), [(0.0, 0.0), (-1.0, -1.0)])
def test_a_policy_term_without_its_gradient_or_with_the_wrong_sign_is_seen(
    made, monkeypatch, factor, cosine
):
    real = micro_batch_loss.loss_terms

    def changed(scores, targets, objective):
        terms = real(scores, targets, objective)
        policy = terms.policy.detach() + factor * (terms.policy - terms.policy.detach())
        return replace(terms, policy=policy)

    monkeypatch.setattr(micro_batch_loss, "loss_terms", changed)
    _, answers = asked(made)
    assert answers["policy_gradient"]["cosine"] == pytest.approx(cosine, abs=1e-5)


def test_nothing_moves_by_being_asked(made):
    policy = small_policy()
    learner = learner_of(policy, drifted_reference(policy))
    before = [p.detach().clone() for p in weights(policy)]
    state = torch.get_rng_state()
    learner.probe(batch_of(made), kl_coef=0.1)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(policy), strict=True))
    assert all(p.grad is None for p in weights(policy))
    assert torch.equal(state, torch.get_rng_state())


def test_where_policy_and_reference_agree_there_is_no_gradient_to_compare(made):
    _, answers = asked(made, by=0.0)
    answer = answers["kl_gradient"]
    assert (answer["ratio"], answer["cosine"], answer["norm"]) == (None, None, 0.0)


def test_an_adapter_that_adds_nothing_is_its_own_base(made):
    _, answers = asked(made, lora_rank=2)
    off = answers["adapters_off"]
    assert off["off_to_reference"] == off["off_to_policy"] == off["policy_to_reference"] == 0


MUTANTS = {
    "negated": (lambda kl: -kl, -1.0),
    "twice": (lambda kl: 2 * kl, 2.0),
    "half": (lambda kl: 0.5 * kl, 0.5),
    "detached": (lambda kl: kl.detach(), 0.0),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_term_that_is_not_what_it_says_shows_by_how_much(made, monkeypatch, name):
    change, ratio = MUTANTS[name]
    real = micro_batch_loss.loss_terms

    def spoilt(*given):
        parts = real(*given)
        if parts.kl is None:
            return parts
        return replace(parts, kl=change(parts.kl) + 0.0 * parts.policy)

    monkeypatch.setattr(micro_batch_loss, "loss_terms", spoilt)
    _, answers = asked(made)
    assert answers["kl_gradient"]["ratio"] == pytest.approx(ratio, abs=1e-3)


def test_another_estimator_is_recognised(made, monkeypatch):
    real = micro_batch_loss.loss_terms
    monkeypatch.setattr(
        micro_batch_loss,
        "loss_terms",
        lambda scores, targets, objective: real(
            scores,
            targets,
            objective if objective.estimator is None else replace(objective, estimator="k1"),
        ),
    )
    _, answers = asked(made)
    answer = answers["kl_gradient"]
    assert answer["looks_like"] == "k1"
    assert abs(answer["cosine"]) < 0.9
    assert np.isfinite(answer["norm"])
