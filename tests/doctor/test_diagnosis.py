"""Triage, ranking and abstention, with checks that are pretended."""

from dataclasses import replace

import pytest

from evidence.records import full_record
from klinic.checks.base import (
    Case,
    Check,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
    warning_finding,
)
from klinic.doctor.diagnosis import Status, diagnose
from klinic.evidence.verdict import Verdict


def check(name, stage, says=passed_finding, **more):
    return Check(
        name=name,
        description="a fault",
        stage=stage,
        needs=(),
        fix=f"Mend {name}.",
        judge=lambda _: says("s"),
        **more,
    )


def cases(num=3):
    return [Case(record=full_record(step=step)) for step in range(1, num + 1)]


def test_the_earliest_stage_is_the_cause():
    checks = [
        check("late", Stage.DYNAMICS, failed_finding),
        check("early", Stage.ALIGNMENT, failed_finding),
    ]
    found = diagnose(cases(), checks)
    assert (found.cause, found.first_step, found.fix) == ("early", 1, "Mend early.")
    assert {h.check.name for h in found.with_status(Status.CONFIRMED)} == {"late", "early"}


def test_what_a_cause_explains_is_not_another_one():
    effect = check("effect", Stage.ALIGNMENT, failed_finding)
    cause = check("cause", Stage.SAMPLER, failed_finding, explains=("effect",))
    found = diagnose(cases(), [effect, cause])
    assert found.cause == "cause"
    assert found.with_status(Status.EXPLAINED)[0].check.name == "effect"


def test_nothing_wrong_is_no_cause_with_everything_ruled_out():
    found = diagnose(cases(), [check("one", Stage.SAMPLER), check("two", Stage.DYNAMICS)])
    assert (found.cause, found.confidence, found.missing) == (None, 1.0, ())
    assert len(found.with_status(Status.RULED_OUT)) == 2


def test_a_cause_is_not_named_while_what_could_explain_it_was_not_looked_at():
    blind = check("blind", Stage.SAMPLER, explains=("late",))
    blind = replace(blind, needs=("record.logp_sampler",))
    late = check("late", Stage.DYNAMICS, failed_finding)
    bare = [replace(c, record=replace(c.record, logp_sampler=None)) for c in cases()]
    found = diagnose(bare, [blind, late])
    assert (found.cause, found.confidence) == (None, 0.0)
    assert found.missing == ("record.logp_sampler",)
    assert diagnose(cases(), [blind, late]).cause == "late"


def test_what_cannot_have_left_the_figures_neither_explains_them_nor_is_waited_for():
    def apart(summary):
        return replace(failed_finding(summary), excludes=("other",))

    effect = check("effect", Stage.DYNAMICS, apart)
    other = check("other", Stage.WIRING, failed_finding, explains=("effect",))
    assert not diagnose(cases(), [effect, other]).with_status(Status.EXPLAINED)
    blind = replace(other, needs=("record.logp_sampler",))
    bare = [replace(c, record=replace(c.record, logp_sampler=None)) for c in cases()]
    assert diagnose(bare, [effect, blind]).cause == "effect"
    assert diagnose(bare, [check("effect", Stage.DYNAMICS, failed_finding), blind]).cause is None


def test_a_cause_that_rests_on_nothing_is_named_all_the_same():
    blind = replace(check("blind", Stage.SAMPLER), needs=("record.logp_sampler",))
    bare = [replace(c, record=replace(c.record, logp_sampler=None)) for c in cases()]
    found = diagnose(bare, [blind, check("groups", Stage.ADVANTAGE, failed_finding)])
    assert found.cause == "groups"


def test_the_first_step_in_which_it_shows_is_told():
    late = Check(
        name="late",
        description="a fault",
        stage=Stage.SAMPLER,
        needs=(),
        fix="Mend.",
        judge=lambda case: (failed_finding if case.record.step > 1 else passed_finding)("s"),
    )
    found = diagnose(cases(), [late])
    assert (found.first_step, found.hypotheses[0].num_failed) == (2, 2)


def test_a_check_that_throws_has_found_nothing_and_disturbs_nobody():
    def broken(case):
        raise ZeroDivisionError("of mine")

    thrower = replace(check("thrower", Stage.ALIGNMENT), judge=broken)
    found = diagnose(cases(), [thrower, check("other", Stage.SAMPLER, failed_finding)])
    assert found.hypotheses[0].finding.summary == "the check failed: ZeroDivisionError: of mine"
    assert found.hypotheses[0].status is Status.UNDECIDED
    assert found.cause == "other"


@pytest.mark.parametrize("says", [no_data_finding, passed_finding])
def test_missing_data_is_never_a_pass(says):
    found = diagnose(cases(), [check("one", Stage.SAMPLER, says)])
    assert found.hypotheses[0].status is (
        Status.UNDECIDED if says is no_data_finding else Status.RULED_OUT
    )


@pytest.mark.parametrize("warns_in", [{1}, {2}, {1, 2, 3}])
def test_a_cause_that_was_warned_of_is_undecided_and_the_warning_is_told(warns_in):
    sometimes = replace(
        check("sometimes", Stage.SAMPLER),
        judge=lambda case: (warning_finding if case.record.step in warns_in else passed_finding)(
            "s"
        ),
    )
    found = diagnose(cases(), [sometimes, check("other", Stage.SAMPLER)])
    assert found.hypotheses[0].status is Status.UNDECIDED
    assert found.hypotheses[0].finding.verdict is Verdict.WARN
    assert (found.cause, found.confidence, found.missing) == (None, 0.5, ())


def test_a_cause_that_was_warned_of_and_failed_is_confirmed():
    worse = replace(
        check("worse", Stage.SAMPLER),
        judge=lambda case: (failed_finding if case.record.step == 2 else warning_finding)("s"),
    )
    assert diagnose(cases(), [worse]).cause == "worse"


def test_a_warning_keeps_nobody_from_naming_what_it_could_explain():
    warner = check("warner", Stage.SAMPLER, warning_finding, explains=("late",))
    assert (
        diagnose(cases(), [warner, check("late", Stage.DYNAMICS, failed_finding)]).cause == "late"
    )


def test_a_warning_from_an_answer_of_an_earlier_step_is_no_missing_field():
    warner = check("warner", Stage.SAMPLER, warning_finding, explains=("late",))
    warner = replace(warner, needs=("probes.rescore",))
    asked, *others = cases()
    asked = replace(asked, probe_results={"rescore": {}})
    found = diagnose([asked, *others], [warner, check("late", Stage.DYNAMICS, failed_finding)])
    assert (found.cause, found.missing) == ("late", ())


def test_a_run_without_steps_has_nothing_to_say():
    assert diagnose([], [check("one", Stage.SAMPLER, failed_finding)]).cause is None
