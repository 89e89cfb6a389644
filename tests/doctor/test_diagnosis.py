"""How findings become causes and a verdict, with pretended checks."""

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
from klinic.doctor.diagnosis import diagnose
from klinic.doctor.hypothesis import Status
from klinic.evidence.verdict import RunVerdict, Verdict


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


def test_two_faults_of_which_none_explains_the_other_are_both_named():
    checks = [
        check("late", Stage.DYNAMICS, failed_finding),
        check("early", Stage.ALIGNMENT, failed_finding),
    ]
    found = diagnose(cases(), checks)
    assert (found.cause, found.first_step, found.fix) == ("early", 1, "Mend early.")
    assert [cause.name for cause in found.causes] == ["early", "late"]
    assert {h.check.name for h in found.with_status(Status.CONFIRMED)} == {"late", "early"}
    assert "Also: late" in found.sentence


def test_a_second_fault_is_named_beside_the_effects_of_the_first():
    found = diagnose(
        cases(),
        [
            check("cause", Stage.SAMPLER, failed_finding, explains=("effect",)),
            check("effect", Stage.DYNAMICS, failed_finding),
            check("second", Stage.WIRING, failed_finding),
        ],
    )
    assert [cause.name for cause in found.causes] == ["cause", "second"]
    assert [h.check.name for h in found.with_status(Status.EXPLAINED)] == ["effect"]


def test_of_two_causes_the_one_that_explains_more_is_named():
    explains_one = check("one", Stage.ALIGNMENT, failed_finding, explains=("first",))
    explains_both = check("both", Stage.SAMPLER, failed_finding, explains=("one", "first", "other"))
    effects = [check(name, Stage.DYNAMICS, failed_finding) for name in ("first", "other")]
    found = diagnose(cases(), [explains_one, explains_both, *effects])
    assert [cause.name for cause in found.causes] == ["both"]


def test_of_two_causes_that_explain_each_other_the_earlier_is_likely_and_both_are_shown():
    upper = check("upper", Stage.ALIGNMENT, failed_finding, explains=("lower",))
    lower = check("lower", Stage.SAMPLER, failed_finding, explains=("upper",))
    found = diagnose(cases(), [lower, upper])
    assert (found.cause, found.verdict) == ("upper", RunVerdict.LIKELY)
    assert found.causes[0].explains == ("upper", "lower")
    assert [(rival.name, rival.fields) for rival in found.rivals] == [("lower", ())]
    assert found.rivals_sentence == f"Not excluded: lower ({found.rivals[0].probability:.0%})"


def test_what_a_cause_explains_is_not_another_one():
    effect = check("effect", Stage.ALIGNMENT, failed_finding)
    cause = check("cause", Stage.SAMPLER, failed_finding, explains=("effect",))
    found = diagnose(cases(), [effect, cause])
    assert found.cause == "cause"
    assert found.with_status(Status.EXPLAINED)[0].check.name == "effect"


def test_nothing_wrong_is_no_cause_with_everything_ruled_out():
    found = diagnose(cases(), [check("one", Stage.SAMPLER), check("two", Stage.DYNAMICS)])
    assert (found.cause, found.verdict, found.missing) == (None, RunVerdict.NONE, ())
    assert len(found.with_status(Status.RULED_OUT)) == 2
    assert found.headline == "No fault found: all 2 checks passed."


def blind_check(name, **more):
    """Return a check whose evidence `cases_without_sampler` do not have."""
    return replace(check(name, Stage.SAMPLER, **more), needs=("record.logp_sampler",))


def cases_without_sampler():
    return [replace(c, record=replace(c.record, logp_sampler=None)) for c in cases()]


def test_a_cause_is_only_likely_while_another_could_explain_it():
    blind = blind_check("blind", explains=("late",))
    late = check("late", Stage.DYNAMICS, failed_finding)
    found = diagnose(cases_without_sampler(), [blind, late])
    assert (found.cause, found.verdict) == ("late", RunVerdict.LIKELY)
    assert found.missing == ("record.logp_sampler",)
    assert [rival.name for rival in found.rivals] == ["blind"]
    assert found.headline.startswith("Most likely cause: late (")
    assert "blind (needs record.logp_sampler)" in found.rivals_sentence
    decided = diagnose(cases(), [blind, late])
    assert (decided.cause, decided.verdict, decided.rivals) == ("late", RunVerdict.CAUSE, ())


def test_a_failed_check_is_not_hidden_behind_many_unrecorded_rivals():
    rivals = [blind_check(f"rival {n}", explains=("late",)) for n in range(6)]
    late = check("late", Stage.DYNAMICS, failed_finding)
    found = diagnose(cases_without_sampler(), [*rivals, late])
    assert (found.cause, found.verdict, found.sick) == ("late", RunVerdict.LIKELY, True)
    assert found.confidence < 0.5
    assert len(found.rivals) == 6
    assert found.to_json()["cause"] is None
    assert [cause["name"] for cause in found.to_json()["causes"]] == ["late"]


def test_a_symptom_with_unrecorded_rivals_is_no_cause_and_the_run_is_sick():
    rivals = [blind_check(f"rival {n}", explains=("late",)) for n in range(6)]
    late = check("late", Stage.DYNAMICS, failed_finding, is_symptom=True)
    found = diagnose(cases_without_sampler(), [*rivals, late])
    assert (found.cause, found.verdict, found.sick) == (None, RunVerdict.NONE, True)
    assert found.headline == "No cause found, but something is wrong. Failed: late"
    assert found.unexplained == ("late",)


def test_a_failure_of_one_step_in_many_is_less_certain():
    once = replace(
        check("once", Stage.SAMPLER),
        judge=lambda case: (failed_finding if case.record.step == 7 else passed_finding)("s"),
    )
    short, long = (diagnose(cases(num), [once]) for num in (7, 100))
    assert short.verdict is RunVerdict.CAUSE
    assert long.verdict is not RunVerdict.CAUSE
    assert long.sick


def test_what_cannot_have_left_the_figures_neither_explains_them_nor_is_waited_for():
    def apart(summary):
        return replace(failed_finding(summary), excludes=("other",))

    effect = check("effect", Stage.DYNAMICS, apart)
    other = check("other", Stage.WIRING, failed_finding, explains=("effect",))
    assert not diagnose(cases(), [effect, other]).with_status(Status.EXPLAINED)
    blind = replace(other, needs=("record.logp_sampler",))
    bare = cases_without_sampler()
    assert diagnose(bare, [effect, blind]).verdict is RunVerdict.CAUSE
    open_effect = check("effect", Stage.DYNAMICS, failed_finding)
    assert diagnose(bare, [open_effect, blind]).verdict is RunVerdict.LIKELY


def test_a_cause_that_rests_on_nothing_is_named_all_the_same():
    found = diagnose(
        cases_without_sampler(),
        [blind_check("blind"), check("groups", Stage.ADVANTAGE, failed_finding)],
    )
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
    assert (found.cause, found.verdict, found.missing) == (None, RunVerdict.NONE, ())


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
