"""`klinic check` on the real parts of a recipe: every part is told of, and faults are named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from klinic.faults import FAULTS
from klinic.faults.base import Severity
from klinic.lab.scoreboard_run import TRIAL_SETTINGS
from klinic.model import loading
from klinic.recipe.loading import from_keywords
from klinic.replay import single_batch as single_batch_module
from klinic.replay.single_batch import check_single_batch
from klinic.training import build as assembly_module

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]
PARTS = [
    "model and device",
    "sampling",
    "rewards",
    "scoring",
    "reference",
    "update",
    "NaN handling",
]


def checked(**settings):
    recipe = from_keywords(**{**TRIAL_SETTINGS, "warm_start.steps": 40, **settings}).recipe
    told = []
    return check_single_batch(recipe, told.append)


def test_every_part_of_a_healthy_recipe_is_well():
    found = checked()
    assert [part.name for part in found.components] == PARTS
    assert all(part.ok for part in found.components)
    assert found.diagnosis.cause is None
    assert found.ok
    assert len(found.samples) == 3
    says = {part.name: part.detail for part in found.components}
    assert "795,136 parameters" in says["model and device"]
    assert "truncated without EOS" in says["sampling"]
    assert "correct answers get 1.000" in says["rewards"]
    assert "discarded" in says["NaN handling"]
    judged = {h.check.name for h in found.diagnosis.hypotheses if h.num_judged}
    assert {"kl-not-applied", "wrong-reference", "loss-scaled-wrong"} <= judged


def test_a_warm_start_is_made_from_a_model_that_is_loaded_once(monkeypatch):
    loaded = []
    load = loading.load_merged_policy

    def counted(*given, **how):
        loaded.append(given)
        return load(*given, **how)

    for module in (single_batch_module, assembly_module):
        monkeypatch.setattr(module, "load_merged_policy", counted)
    found = checked(**{"warm_start.steps": 50})
    assert "warm start cut to 40 of 50 steps" in found.components[0].detail
    assert len(loaded) == 1


SEEN = ("temperature-on-one-side", "kl-sign-flipped", "wrong-reference", "dropout-in-scoring")


@pytest.mark.slow
@pytest.mark.parametrize("cause", SEEN)
def test_what_is_wrong_from_the_start_is_named_before_an_hour_is_spent(cause):
    fault = next(fault for fault in FAULTS if fault.cause == cause)
    with fault.inject(Severity.NORMAL):
        found = checked(**fault.settings)
    assert not found.ok
    assert found.diagnosis.cause == cause


@pytest.mark.slow  # the page about it runs the command
def test_the_command_prints_one_object_and_its_exit_code_is_for_machines(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model: tiny\ntask: arithmetic\nwarm_start:\n  steps: 40\nkl:\n  coef: 0.01\n"
    )
    command = [str(Path(sys.executable).with_name("klinic")), "check", str(recipe), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = json.loads(done.stdout)
    assert done.returncode == 0
    assert (said["command"], said["ok"], said["cause"]) == ("check", True, None)
    assert [part["name"] for part in said["parts"]] == PARTS
    assert said.keys() >= {"confidence", "findings", "ruled_out", "missing", "fix", "first_step"}
