"""The figures of a scoreboard, by outcomes that are made up; trials themselves are real runs."""

import pytest
from rich.console import Console

from klinic.faults import FAULTS, Severity
from klinic.faults.base import patched
from klinic.faults.second import SECOND
from klinic.lab import healthy
from klinic.lab.confusion import NOBODY, counts
from klinic.lab.outcome import HEALTHY, Outcome
from klinic.lab.score_table import show
from klinic.lab.scoreboard import Trial, measured, outcome, summary, trials
from klinic.lab.trial import SETTINGS
from klinic.recipe.loading import from_keywords


def made(cause, named, severity="normal", ranked=(), **more):
    return Outcome(
        cause=cause,
        mechanism="m",
        severity=severity,
        seed=0,
        named=named,
        ranked=ranked,
        missing=(),
        first_step=1,
        without={"logp_sampler": None, "logp_old": named},
        seconds=1.0,
        **more,
    )


OUTCOMES = {
    1: [
        made("wrong-groups", "wrong-groups", visible_at_start=True, proved=True),
        made("stale-sampler", "wrong-groups", ranked=("wrong-groups", "stale-sampler")),
        made("stale-sampler", None),
        made("stale-sampler", None, severity="mild"),
    ],
    2: [made("wrong-groups", "wrong-groups")],
    0: [made(HEALTHY, None), made(HEALTHY, "stale-sampler")],
}


def test_the_figures_are_shares_of_what_they_say():
    figures = summary(OUTCOMES)
    assert figures["cases"] == 5
    assert figures["top1"] == pytest.approx(1 / 3)
    assert figures["top3"] == pytest.approx(2 / 3)
    assert figures["abstained"] == figures["wrong"] == pytest.approx(1 / 3)
    assert (figures["healthy_runs"], figures["false_alarms"]) == (2, 1)
    assert figures["second_mechanism_top1"] == figures["before_first_commit"] == 1
    assert figures["without"]["logp_sampler"]["abstained"] == 1
    assert figures["without"]["logp_old"]["wrong"] == pytest.approx(1 / 4)
    assert figures["proved"] == 1
    assert figures["by_cause"]["stale-sampler"]["also_named"] == {"wrong-groups": 1, "none": 2}


def test_the_matrix_has_a_row_for_what_was_wrong_and_a_column_for_what_was_named():
    rows, columns, table = counts([o for outcomes in OUTCOMES.values() for o in outcomes])
    assert rows == ["stale-sampler", "wrong-groups", HEALTHY]
    assert table.sum() == 7
    assert table[rows.index("stale-sampler"), columns.index(NOBODY)] == 2
    assert table[rows.index(HEALTHY), columns.index("stale-sampler")] == 1


def test_every_fault_is_tried_by_every_mechanism_severity_and_seed_and_40_runs_are_well():
    every = list(trials((), 3, list(Severity)))
    sick = [t for t in every if t.mechanism]
    assert len(sick) == 6 * (len(FAULTS) + len(SECOND))
    assert len(every) - len(sick) >= 40
    assert len({*every}) == len(every)


def test_the_second_mechanism_is_another_one():
    first = {fault.cause: fault for fault in FAULTS}
    for fault in SECOND:
        assert fault.mechanism != first[fault.cause].mechanism
        assert fault.inject is not first[fault.cause].inject


@pytest.mark.parametrize("severity", Severity)
@pytest.mark.parametrize("fault", [*FAULTS, *SECOND], ids=lambda fault: fault.mechanism)
def test_every_fault_fits_what_it_stands_for_and_leaves_it_as_it_was(fault, severity):
    with fault.inject(severity):
        pass


def test_a_change_that_could_not_be_called_as_the_real_one_is_refused():
    class Owner:
        def method(self, one, two, *, three, four=4):
            return one, two, three, four

    with (
        pytest.raises(TypeError, match="too many positional"),
        patched(Owner, "method", lambda real, self, one, **how: real(self, one, 2, **how)),
    ):
        pass
    with patched(
        Owner, "method", lambda real, self, one, *rest, **how: real(self, 7, *rest, **how)
    ):
        assert Owner().method(1, 2, three=3) == (7, 2, 3, 4)
    assert Owner().method(1, 2, three=3) == (1, 2, 3, 4)


@pytest.mark.parametrize("name", healthy.VARIANTS)
def test_the_settings_of_a_healthy_run_are_a_recipe(name):
    assert from_keywords(**{**SETTINGS, **healthy.VARIANTS[name]}).recipe


def test_a_trial_that_throws_is_neither_right_nor_abstained_nor_an_alarm():
    broken = [made(cause, None, error="ValueError: x") for cause in ("wrong-groups", HEALTHY)]
    figures = summary({1: broken[:1], 2: [], 0: broken[1:]})
    assert (figures["errors"], figures["false_alarms"]) == (2, 0)
    assert figures["top1"] == figures["abstained"] == figures["wrong"] == 0
    assert figures["by_cause"]["wrong-groups"]["also_named"] == {"error": 1}


@pytest.mark.timeout(300)
def test_a_trial_that_throws_does_not_end_the_others(tmp_path):
    bad = [Trial(cause=HEALTHY, mechanism=0, severity=f"unknown {n}", seed=0) for n in (1, 2)]
    found = measured(bad, 1, tmp_path / "out")
    assert [o.error for o in found[0]] == ["KeyError: 'unknown 1'", "KeyError: 'unknown 2'"]
    written = (tmp_path / "out" / "outcomes.jsonl").read_text().splitlines()
    assert len(written) == 2
    show(summary(found), found, Console(quiet=True))


@pytest.mark.timeout(300)
@pytest.mark.slow  # a whole run, as test_trial.py has them
def test_a_trial_is_looked_at_with_and_without_columns(warm):
    found = outcome(Trial(cause="wrong-groups", mechanism=1, severity="mild", seed=1))
    assert (found.right, found.first_step) == (True, 1)
    assert found.without == {"logp_sampler": "wrong-groups", "logp_old": "wrong-groups"}
