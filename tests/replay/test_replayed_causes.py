"""Causes proved by making their step again: real faults, real replays."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from klinic.checks import CHECKS
from klinic.errors import EvidenceError
from klinic.faults import FAULTS
from klinic.lab.scoreboard_outcome import confirm_by_replay, diagnose_run
from klinic.lab.scoreboard_run import train_trial
from klinic.replay import sampler_changes
from klinic.replay.changes import CHANGES
from klinic.replay.replay import Replay

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]


def fault_of(cause):
    return next(fault for fault in FAULTS if fault.cause == cause)


def test_every_change_is_that_of_a_check():
    assert CHANGES.keys() <= {check.name for check in CHECKS}


@pytest.mark.slow  # the pages of the two stories run it in every run of all tests
def test_a_cause_is_proved_by_the_command(tmp_path):
    run = train_trial(
        tmp_path / "sick", fault_of("temperature-on-one-side"), **{"loop.max_steps": 2}
    )
    command = [
        str(Path(sys.executable).with_name("klinic")),
        "diagnose",
        str(run),
        "--prove",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = json.loads(done.stdout)
    assert done.returncode == 1
    proof = said["proof"]
    assert proof["confirmed"]
    assert proof["replay_apart"] == 0
    assert proof["after"] < proof["before"] / 5


def test_a_step_is_made_again_bit_for_bit(tmp_path):
    replay = Replay(train_trial(tmp_path / "well", **{"loop.max_steps": 2}), 2)
    assert (replay.replayed, replay.logp_difference()) == ((1,), 0)


@pytest.mark.slow
def test_a_step_is_made_again_from_the_checkpoint_before_it(tmp_path):
    run = train_trial(tmp_path / "well", **{"loop.max_steps": 4, "loop.checkpoint_every": 2})
    assert Replay(run, 4).replayed == (3,)
    assert Replay(run, 4).logp_difference() == 0
    assert Replay(run, 2).replayed == (1,)


def test_a_run_of_somebody_else_cannot_be_made_again(tmp_path):
    with pytest.raises(EvidenceError, match=r"has no recipe\.yaml"):
        Replay(tmp_path, 1)


@pytest.mark.slow
@pytest.mark.parametrize("cause", CHANGES)
def test_every_cause_that_has_a_change_is_proved(tmp_path, cause):
    run = train_trial(tmp_path / "sick", fault_of(cause))
    found, _ = diagnose_run(run)
    assert found.cause == cause
    assert confirm_by_replay(run, found)


@pytest.mark.slow
def test_a_step_is_made_again_with_the_coefficient_that_it_had(tmp_path):
    how = {"loop.max_steps": 4, "kl.controller": "log_pi"}
    replay = Replay(train_trial(tmp_path / "adapted", **how), 4)
    assert replay.logp_difference() == 0


@pytest.mark.slow  # a whole run of replays
def test_older_weights_are_those_before_every_step_made_again(tmp_path):
    run = train_trial(tmp_path / "well", **{"loop.max_steps": 3})
    replay = Replay(run, 3)
    found = [older.score_tokens(replay.record) for older in sampler_changes._older_replays(replay)]
    assert len(found) == 2
    for step, logp in enumerate(found, 1):
        np.testing.assert_array_equal(logp, Replay(run, step).score_tokens(replay.record))
