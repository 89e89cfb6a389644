"""Probabilities of causes: exact sums over all sets of causes, and properties of any network."""

import time
from dataclasses import replace
from itertools import combinations
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from klinic.checks import CHECKS
from klinic.checks.base import Check, Stage, failed_finding
from klinic.doctor import weighing
from klinic.doctor.hypothesis import Hypothesis
from klinic.doctor.weighing import ACCIDENT, DETECTED, EFFECT, PRIOR, UNKNOWN, weigh_causes

NAMES = "abcdef"
ABSENT = frozenset({"record.logp_ref"})


def hypothesis_of(name, explains, *, failed, judged=10):
    check = Check(
        name=name,
        description="a fault",
        stage=Stage.SAMPLER,
        needs=("record.logp_ref",),
        fix="Mend it.",
        judge=lambda _: failed_finding("s"),
        explains=explains,
    )
    found = Hypothesis(check=check, num_judged=judged if failed is not None else 0)
    if failed:
        found.num_failed = found.num_judged_since = failed
        found.first_step, found.finding = 1, failed_finding("s")
    return found


NETWORKS = st.lists(
    st.tuples(st.sets(st.sampled_from(NAMES)), st.sampled_from([2, 3, 0, None])),
    min_size=1,
    max_size=len(NAMES),
)
"""For each cause its effects, and in how many steps its check failed; None: it is unrecorded."""


def hypotheses_of(network):
    return [
        hypothesis_of(name, tuple(effects - {name}), failed=failed)
        for name, (effects, failed) in zip(NAMES, network, strict=False)
    ]


def weighed(hypotheses):
    return {w.hypothesis.check.name: w.probability for w in weigh_causes(hypotheses, ABSENT)}


def summed_by_hand(hypotheses):
    """Return the same probabilities by one sum over sets, in plain Python."""
    failed = [h for h in hypotheses if h.num_failed]
    rivals = [
        h
        for h in hypotheses
        if not h.num_judged and any(e.check.name in h.check.explains for e in failed)
    ]

    def makes_fail(cause, effect):
        if cause is None:
            return UNKNOWN
        if cause is effect:
            return DETECTED
        return EFFECT if effect.check.name in cause.check.explains else 0.0

    causes, total, by_name = [*failed, *rivals, None], 0.0, {}
    for size in range(weighing.MAX_CAUSES + 1):
        for together in combinations(causes, size):
            weight = PRIOR**size * prod(
                1 - (1 - ACCIDENT) * prod(1 - makes_fail(cause, effect) for cause in together)
                for effect in failed
            )
            total += weight
            for cause in together:
                if cause is not None:
                    name = cause.check.name
                    by_name[name] = by_name.get(name, 0.0) + weight
    return {name: weight / total for name, weight in by_name.items()} if failed else {}


@settings(max_examples=150, deadline=None)
@given(NETWORKS)
def test_probabilities_are_the_sum_over_all_sets(network):
    hypotheses = hypotheses_of(network)
    assert weighed(hypotheses) == pytest.approx(summed_by_hand(hypotheses), abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(NETWORKS)
def test_the_order_of_the_catalogue_changes_nothing(network):
    hypotheses = hypotheses_of(network)
    assert weighed(hypotheses[::-1]) == pytest.approx(weighed(hypotheses), abs=1e-12)


def test_every_effect_that_shows_makes_its_cause_more_probable():
    effects = [hypothesis_of(name, (), failed=3) for name in "bcd"]
    cause = hypothesis_of("a", tuple("bcd"), failed=3)
    probabilities = [weighed([cause, *effects[:num]])["a"] for num in range(4)]
    assert probabilities == sorted(probabilities)
    assert 0.9 < probabilities[0] < probabilities[3]


def test_a_check_that_passes_again_is_weaker_evidence():
    persistent, sporadic = (hypothesis_of("a", (), failed=3) for _ in range(2))
    sporadic.num_judged_since = 9
    assert weighed([sporadic])["a"] < 0.9 < weighed([persistent])["a"]


def test_a_cause_that_accounts_for_the_whole_anomaly_leaves_little_to_rivals():
    rivals = [hypothesis_of(name, ("a",), failed=None) for name in "bcd"]
    failed = hypothesis_of("a", (), failed=3)
    failed.finding = failed_finding("s", explained=0.99)
    assert weighed([failed, *rivals])["a"] > 0.9
    failed.finding = failed_finding("s")
    assert weighed([failed, *rivals])["a"] < 0.6


def test_a_symptom_alone_is_weaker_evidence_of_its_own_cause():
    plain, symptom = (hypothesis_of("a", (), failed=3) for _ in range(2))
    symptom.check = replace(symptom.check, is_symptom=True)
    assert weighed([symptom])["a"] < 0.7 < weighed([plain])["a"]


def test_each_unrecorded_rival_makes_a_cause_less_probable():
    failed = hypothesis_of("a", (), failed=3)
    rivals = [hypothesis_of(name, ("a",), failed=None) for name in "bcd"]
    probabilities = [weighed([failed, *rivals[:num]])["a"] for num in range(4)]
    assert probabilities == sorted(probabilities, reverse=True)


def test_a_rival_whose_fields_are_recorded_is_no_rival():
    failed = hypothesis_of("a", (), failed=3)
    rival = hypothesis_of("b", ("a",), failed=None)
    assert "b" in {w.hypothesis.check.name for w in weigh_causes([failed, rival], ABSENT)}
    assert len(weigh_causes([failed, rival], frozenset())) == 1


def test_all_checks_of_the_catalogue_can_fail_at_once():
    hypotheses = [Hypothesis(check=check, num_judged=3, num_failed=2) for check in CHECKS]
    begun = time.process_time()
    assert len(weigh_causes(hypotheses, frozenset())) == len(CHECKS)
    assert time.process_time() - begun < 1.0, "the live doctor does this in every step"
