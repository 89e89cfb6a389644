"""A value that stops being a number, at any site and step: the run is well in the end."""

import json
import math
from pathlib import Path

import pytest

import klinic
from klinic.errors import EvidenceError, LogitsError, RunStoppedError
from klinic.recipe.sections import RecoverySection
from klinic.training.recovery import RecoveryManager
from klinic.training.source import TaskData
from training.killing import differences
from training.poison import FURTHER, NAMED, SITES, Poison, all_numbers

pytestmark = [pytest.mark.usefixtures("as_before"), pytest.mark.timeout(300)]

NUM_STEPS = 7
SETTINGS = {
    "kl_coef": 0.1,
    "max_steps": NUM_STEPS,
    "prompts_per_step": 2,
    "group_size": 3,
    "max_new_tokens": 4,
    "learning_rate": 1e-3,
    "loop.checkpoint_every": 3,
    "output.trackers": [],
    "output.doctor": "none",
    "threads": 1,
}
ROWS = [{"prompt": f"{n}+{n}="} for n in range(40)]
STEPS = (1, 2, 4, 6, 7)  # the first and the last, behind a checkpoint, before one, in between


def train(folder, poison, **settings):
    return klinic.train(
        model="tiny",
        reward_funcs=poison.reward,
        train_dataset=ROWS,
        **{**SETTINGS, "output.dir": str(folder), **settings},
    )


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clean") / "run"
    train(folder, Poison(site="", place=0, value=0.0, once=True))
    return folder


def events(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def value_of(site, step):
    """Both kinds at every site, both at every step."""
    return math.nan if ((*SITES, *FURTHER).index(site) + step) % 2 else math.inf


def first_place(folder, step):
    """Return where a step begins in the data, which is behind all rounds of the steps before."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    rounds = [line["sampling/rounds"] for line in lines if "loss" in line]
    return 1 + int(sum(rounds[: step - 1]))


def strike(tmp_path, monkeypatch, site, step, *, once, place=None, **settings):
    poison = Poison(site=site, place=place or step, value=value_of(site, step), once=once)
    with monkeypatch.context() as patched:
        poison.put_into(patched)
        train(tmp_path / "run", poison, **settings)
    assert poison.struck == (1 if once else poison.struck) >= 1
    assert all_numbers(tmp_path / "run")
    told = [event for event in events(tmp_path / "run") if event["event"] == "trouble"]
    assert {event["site"] for event in told} == {NAMED.get(site, site)}
    assert {event["step"] for event in told} == {step}
    return tmp_path / "run", told


def check_transient(tmp_path, monkeypatch, clean, site, step):
    run, told = strike(tmp_path, monkeypatch, site, step, once=True)
    assert len(told) == 1
    assert [e["step"] for e in events(run) if e["event"] == "transient"] == [step]
    assert differences(clean, run) == []


def check_persistent(tmp_path, monkeypatch, clean, site, step):
    run, told = strike(tmp_path, monkeypatch, site, step, once=False)
    assert len(told) == 2
    assert not [e for e in events(run) if e["event"] == "transient"]
    assert "persistent" in told[-1]["says"]
    plan = json.loads((run / "recovery.json").read_text())
    if site == "reward":  # the row is left out, and the batch is used
        assert (plan["known"], plan["skipped"]) == (["reward"], [])
        return
    assert plan["skipped"] == [step]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps if "loss" in s] == list(range(1, NUM_STEPS + 1))
    cut = [s["learning_rate"] for s in steps if "loss" in s and s["step"] >= step]
    assert cut == pytest.approx([1e-4] * len(cut))


QUICK = [(site, STEPS[number % len(STEPS)]) for number, site in enumerate(SITES)]


@pytest.mark.parametrize(("site", "step"), QUICK)
def test_a_transient_leaves_no_trace(tmp_path, monkeypatch, clean, site, step):
    check_transient(tmp_path, monkeypatch, clean, site, step)


@pytest.mark.parametrize(("site", "step"), QUICK[::2])
def test_what_stays_is_left_out(tmp_path, monkeypatch, clean, site, step):
    check_persistent(tmp_path, monkeypatch, clean, site, step)


MOVING = {"reference.ema": 0.5, "learner.updates_per_batch": 2, "learner.schedule": "cosine"}
MOVING |= {"kl.controller": "log_pi", "loop.extra_rounds": 1}


@pytest.fixture(scope="module")
def moving(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moving") / "run"
    train(folder, Poison(site="", place=0, value=0.0, once=True), **MOVING)
    return folder


@pytest.mark.parametrize("site", FURTHER)
def test_with_everything_that_moves_a_transient_leaves_no_trace(
    tmp_path, monkeypatch, moving, site
):
    """Two updates a batch, a reference that follows, a controller, batches that are replaced."""
    step = 6 if site == "weights while saving" else 5  # the checkpoint is at 6
    how = {**MOVING, "place": first_place(moving, step)}
    run, told = strike(tmp_path, monkeypatch, site, step, once=True, **how)
    assert len(told) == 1
    assert [e["step"] for e in events(run) if e["event"] == "transient"] == [step]
    assert differences(moving, run) == []


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("site", SITES)
def test_every_site_at_every_step(tmp_path, monkeypatch, clean, site, step):
    check_transient(tmp_path / "once", monkeypatch, clean, site, step)
    check_persistent(tmp_path / "always", monkeypatch, clean, site, step)


def test_trouble_that_never_ends_stops_the_run_and_says_why(tmp_path, monkeypatch):
    poison = Poison(site="gradient", place=0, value=math.nan, once=False)
    monkeypatch.setattr(poison, "strikes", lambda site: site == "gradient" and poison.here >= 3)
    poison.put_into(monkeypatch)
    with pytest.raises(RunStoppedError, match=r"gradient: not a number: failed batch 5 in a row"):
        train(tmp_path / "run", poison)
    assert all_numbers(tmp_path / "run")
    last = max((tmp_path / "run" / "checkpoints").glob("step=*"))
    assert last.name == "step=000002"  # nothing that was well is lost
    assert Path(last / "model").is_dir()


def test_a_policy_that_fails_in_an_evaluation_is_asked_again(tmp_path, monkeypatch):
    asked = []

    def evaluate(real, *args):
        asked.append(1)
        if len(asked) == 2:
            raise LogitsError("not numbers")
        return real(*args)

    poison = Poison(site="", place=0, value=0.0, once=True)
    real = TaskData.evaluate
    monkeypatch.setattr(TaskData, "evaluate", lambda *args: evaluate(real, *args))
    monkeypatch.setattr(TaskData, "has_held_out_rows", True)
    train(tmp_path / "run", poison, **{"loop.eval_every": 3})
    assert [(e["step"], e["event"]) for e in events(tmp_path / "run")] == [(3, "evaluation failed")]
    assert len(asked) == 5  # before, at 3 twice, at 6 and at the end


def test_without_recovery_what_is_not_a_number_is_not_saved(tmp_path, monkeypatch):
    poison = Poison(site="optimizer", place=3, value=math.nan, once=True)
    poison.put_into(monkeypatch)
    with pytest.raises(RunStoppedError, match=r"optimizer: not a number at step 3.*not saved"):
        train(tmp_path / "run", poison, recovery=None, **{"loop.checkpoint_every": 1})
    assert all_numbers(tmp_path / "run")


def test_a_plan_that_was_edited_is_named(tmp_path):
    (tmp_path / "recovery.json").write_text('{"skipped": 3}')
    with pytest.raises(EvidenceError, match=r"recovery\.json is damaged"):
        RecoveryManager(tmp_path, RecoverySection())


def test_without_recovery_an_update_is_dropped_and_the_step_is_counted(tmp_path, monkeypatch):
    poison = Poison(site="gradient", place=2, value=math.nan, once=True)
    poison.put_into(monkeypatch)
    train(tmp_path / "run", poison, recovery=None)
    assert all_numbers(tmp_path / "run")
    assert [(e["event"], e["step"]) for e in events(tmp_path / "run")] == [("discarded", 2)]
