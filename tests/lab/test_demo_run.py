"""The demo: what it can show, how it looks, and that a fault spoils nothing that is kept."""

import io
from importlib.resources import as_file, files

import pytest
from rich.console import Console

from klinic.checks import CHECKS
from klinic.doctor.cases import read_cases
from klinic.doctor.diagnosis import diagnose
from klinic.errors import ConfigError
from klinic.faults import FAULTS
from klinic.lab import scoreboard_run
from klinic.lab.demo.out_folder import check_empty
from klinic.lab.demo.run import demo_recipe, find_fault, train_demo
from klinic.lab.demo.shown import DEMO_FAULTS, EXCLUDED
from klinic.lab.demo.view import DemoView
from klinic.recipe.loading import load_recipe
from klinic.training.run_folder import START_FOLDER

FEW = {"warm_start.steps": 3, "loop.max_steps": 1, "loop.eval_prompts": 2}


def test_what_is_shown_has_a_fault_and_what_is_left_out_has_a_reason():
    assert set(DEMO_FAULTS) <= {fault.cause for fault in FAULTS}
    assert set(DEMO_FAULTS) | set(EXCLUDED) == {check.name for check in CHECKS}
    assert all(EXCLUDED.values())


@pytest.mark.parametrize("name", DEMO_FAULTS)
def test_every_fault_has_a_recipe_with_what_it_needs_and_what_the_user_asks_for(name, tmp_path):
    fault = find_fault(name)
    recipe = demo_recipe(fault, tmp_path / "run", ["seed=7", "loop.prompts_per_step=5"])
    assert recipe.recovery is None
    assert recipe.kl is not None
    assert (recipe.seed, recipe.loop.prompts_per_step) == (7, 5)
    assert recipe.output.dir == str(tmp_path / "run")
    if "kl.estimator" in fault.settings:
        assert recipe.kl.estimator == fault.settings["kl.estimator"]


def test_the_recipe_of_the_demo_is_read_without_a_word():
    with as_file(files("klinic.lab.demo") / "recipe.yaml") as path:
        assert load_recipe(path).notes == []


@pytest.mark.timeout(300)
def test_a_fault_does_not_reach_the_warm_start_that_is_kept(tmp_path, monkeypatch, as_before):
    weights = {}
    for name, fault in (("well", None), ("sick", find_fault("step-too-big"))):
        monkeypatch.setenv("KLINIC_CACHE", str(tmp_path / "cache" / name))
        run = scoreboard_run.train_trial(tmp_path / name, fault, **FEW)
        weights[name] = (run / START_FOLDER / "model.safetensors").read_bytes()
    assert weights["well"] == weights["sick"]


def test_a_folder_that_holds_something_is_refused(tmp_path):
    check_empty(tmp_path / "new")
    check_empty(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty, and the demo overwrites nothing"):
        check_empty(tmp_path)


@pytest.mark.parametrize("width", [60, 80, 140])
def test_curves_fit_the_terminal(width):
    console = Console(file=io.StringIO(), width=width)
    view = DemoView(console, max_steps=1000)
    view.log_metrics(0, {"eval/accuracy": 0.25})
    for step in range(1, 1001):
        view.log_metrics(step, {"reward": step / 1000, "kl": step / 1e4})
    with console.capture() as capture:
        console.print(view)
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) == 4


def test_where_nothing_can_move_a_line_is_printed_now_and_then():
    console = Console(file=io.StringIO(), width=200)
    view = DemoView(console, max_steps=20)
    view.begin(step=0)
    view.log_metrics(0, {"eval/accuracy": 0.25, "eval/accuracy/addition": 0.25})
    for step in range(1, 21):
        view.log_metrics(step, {"reward": 0.5, "kl": 0.01, "loss": 1.0})
    view.close()
    assert console.file.getvalue().splitlines() == [
        "Step 0 | Held-out accuracy: 0.250",
        *(f"Step {n} | Reward: 0.500 | KL per token, nats: 0.0100" for n in (1, 10, 20)),
    ]


def test_a_view_forgets_what_a_run_goes_back_behind():
    view = DemoView(Console(file=io.StringIO()), max_steps=3)
    for step in (1, 2, 3):
        view.log_metrics(step, {"reward": float(step)})
    view.rewind(1)
    assert view.reward.values == {1: 1.0}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_held_out_accuracy_rises_and_nothing_is_found(seed, tmp_path):
    recipe = demo_recipe(None, tmp_path / "run", [f"seed={seed}"])
    result = train_demo(recipe, None, Console(quiet=True))
    assert result.after["eval/accuracy"] > result.before["eval/accuracy"] + 0.1
    assert diagnose(read_cases(tmp_path / "run"), CHECKS).cause is None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("name", DEMO_FAULTS)
def test_every_fault_that_is_listed_is_named(name, tmp_path):
    fault = find_fault(name)
    train_demo(demo_recipe(fault, tmp_path / "run", []), fault, Console(quiet=True))
    assert diagnose(read_cases(tmp_path / "run"), CHECKS).cause == name
