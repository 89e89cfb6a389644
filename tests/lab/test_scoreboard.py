"""The figures of a scoreboard, by outcomes that are made up; trials themselves are real runs."""

import contextlib

import pytest
from rich.console import Console

import klinic
from klinic.errors import RunStoppedError
from klinic.faults import FAULTS, SECOND_FAULTS, Severity
from klinic.faults.base import patch_attribute
from klinic.lab import healthy_recipes
from klinic.lab.confusion import NO_CAUSE, count_outcomes
from klinic.lab.score_table import print_scoreboard
from klinic.lab.scoreboard import Trial, list_trials, run_trial, run_trials, summarize_outcomes
from klinic.lab.scoreboard_outcome import HEALTHY, Outcome
from klinic.lab.scoreboard_run import TRIAL_SETTINGS
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
    figures = summarize_outcomes(OUTCOMES)
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
    rows, columns, table = count_outcomes([o for outcomes in OUTCOMES.values() for o in outcomes])
    assert rows == ["stale-sampler", "wrong-groups", HEALTHY]
    assert table.sum() == 7
    assert table[rows.index("stale-sampler"), columns.index(NO_CAUSE)] == 2
    assert table[rows.index(HEALTHY), columns.index("stale-sampler")] == 1


def test_every_fault_is_tried_by_every_mechanism_severity_and_seed_and_200_runs_are_well():
    every = list(list_trials((), 3, list(Severity)))
    sick = [t for t in every if t.mechanism]
    assert len(sick) == 6 * (len(FAULTS) + len(SECOND_FAULTS))
    assert len(every) - len(sick) >= 200
    assert len({*every}) == len(every)


def test_the_second_mechanism_is_another_one():
    first = {fault.cause: fault for fault in FAULTS}
    for fault in SECOND_FAULTS:
        assert fault.mechanism != first[fault.cause].mechanism
        assert fault.inject is not first[fault.cause].inject


@pytest.mark.parametrize("severity", Severity)
@pytest.mark.parametrize("fault", [*FAULTS, *SECOND_FAULTS], ids=lambda fault: fault.mechanism)
def test_every_fault_fits_what_it_stands_for_and_leaves_it_as_it_was(fault, severity):
    with fault.inject(severity):
        pass


def test_a_change_that_could_not_be_called_as_the_real_one_is_refused():
    class Owner:
        def method(self, one, two, *, three, four=4):
            return one, two, three, four

    with (
        pytest.raises(TypeError, match="too many positional"),
        patch_attribute(Owner, "method", lambda real, self, one, **how: real(self, one, 2, **how)),
    ):
        pass
    with patch_attribute(
        Owner, "method", lambda real, self, one, *rest, **how: real(self, 7, *rest, **how)
    ):
        assert Owner().method(1, 2, three=3) == (7, 2, 3, 4)
    assert Owner().method(1, 2, three=3) == (1, 2, 3, 4)


@pytest.mark.parametrize("name", healthy_recipes.VARIANTS)
def test_the_settings_of_a_healthy_run_are_a_recipe(name):
    assert from_keywords(**{**TRIAL_SETTINGS, **healthy_recipes.VARIANTS[name]}).recipe


def test_a_trial_that_throws_is_neither_right_nor_abstained_nor_an_alarm():
    broken = [made(cause, None, error="ValueError: x") for cause in ("wrong-groups", HEALTHY)]
    figures = summarize_outcomes({1: broken[:1], 2: [], 0: broken[1:]})
    assert (figures["errors"], figures["false_alarms"]) == (2, 0)
    assert figures["top1"] == figures["abstained"] == figures["wrong"] == 0
    assert figures["by_cause"]["wrong-groups"]["also_named"] == {"error": 1}


@pytest.mark.timeout(300)
def test_a_trial_that_throws_does_not_end_the_others(tmp_path):
    bad = [Trial(cause=HEALTHY, mechanism=0, severity=f"unknown {n}", seed=0) for n in (1, 2)]
    found = run_trials(bad, 1, tmp_path / "out")
    assert [o.error for o in found[0]] == ["KeyError: 'unknown 1'", "KeyError: 'unknown 2'"]
    written = (tmp_path / "out" / "outcomes.jsonl").read_text().splitlines()
    assert len(written) == 2
    print_scoreboard(summarize_outcomes(found), found, Console(quiet=True))


@pytest.mark.timeout(300)
@pytest.mark.slow  # a whole run, as test_trial.py has them
def test_a_trial_is_looked_at_with_and_without_columns(warm):
    found = run_trial(Trial(cause="wrong-groups", mechanism=1, severity="mild", seed=1))
    assert (found.is_right, found.first_step) == (True, 1)
    assert found.without == {"logp_sampler": "wrong-groups", "logp_old": "wrong-groups"}


@pytest.mark.parametrize(
    "fault",
    [*(pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS), *SECOND_FAULTS],
    ids=lambda fault: fault.mechanism,
)
def test_every_fault_acts_in_a_real_step(fault, tmp_path):
    """A fault reaches into parts by name: one that was renamed would break it unseen."""
    skipped = ("warm_start.", "loop.max_steps", "loop.group_size", "loop.prompts_per_step")
    settings = {
        "kl.coef": 0.1,
        "loop.eval_prompts": 2,
        "output.trackers": [],
        "output.doctor": "none",
        "sampling.max_new_tokens": 3,
        "threads": 1,
        **{k: v for k, v in fault.settings.items() if not k.startswith(skipped)},
    }
    with fault.inject(Severity.NORMAL), contextlib.suppress(RunStoppedError):
        klinic.train(
            model="tiny",
            task="arithmetic",
            output_dir=tmp_path / "run",
            max_steps=1,
            prompts_per_step=2,
            group_size=2,
            **settings,
        )
    assert (tmp_path / "run" / "recipe.yaml").is_file()
