"""`klinic ablate` for real: killed in the middle, with a trial that fails, and gone on with."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from klinic.lab.ablation.results import read_folders
from klinic.runtime.process_tree import descendant_pids
from process_asserts import wait_until_gone

RECIPE = Path(__file__).parents[2] / "recipes" / "arithmetic.yaml"
SHORT = (
    *("warm_start=null", "loop.max_steps=3", "loop.eval_every=0", "loop.eval_prompts=8"),
    *("output.doctor=none", "loop.prompts_per_step=2", "rewards=[graduated]"),
)


def command(folder, *more):
    return [
        sys.executable,
        "-m",
        "klinic.cli",
        "ablate",
        str(RECIPE),
        *SHORT,
        *more,
        "--out",
        folder,
    ]


def finished(folder):
    return sorted(folder.glob("*/seed-*/result.json"))


@pytest.mark.timeout(300)
def test_killed_in_the_middle_it_goes_on_and_one_that_fails_stops_nobody(tmp_path):
    folder = tmp_path / "ablation"
    # more tokens than the model has room for: that trial fails, in its own process
    vary = ("--vary", "sampling.max_new_tokens=4,600,6", "--seeds", "1")
    process = subprocess.Popen(command(folder, *vary), stdout=subprocess.DEVNULL)
    while not finished(folder):
        assert process.poll() is None
        time.sleep(0.05)
    (first,) = finished(folder)
    written = first.stat().st_mtime_ns
    trials = descendant_pids(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until_gone(trials)

    again = subprocess.run(
        command(folder, *vary, "--json"), capture_output=True, text=True, check=False
    )
    assert again.returncode == 1, again.stderr
    assert first.stat().st_mtime_ns == written  # nothing finished was done again
    said = json.loads(again.stdout)
    assert [trial["setting"] for trial in said["trials"]] == [
        "sampling.max_new_tokens=4",
        "sampling.max_new_tokens=6",
    ]
    (failure,) = said["failures"]
    assert failure["trial"] == "sampling.max_new_tokens=600 seed 1"
    assert "the model takes 512" in failure["why"]
    for name in ("index.html", "curves.png", "curves.svg", "trade_off.png", "steps.parquet"):
        assert (folder / name).stat().st_size > 1000
    trials = pq.read_table(folder / "trials.parquet").to_pylist()
    assert [trial["steps"] for trial in trials] == [3, 3]
    assert all(trial["kl_token"] is not None for trial in trials)
    assert pq.read_table(folder / "steps.parquet").num_rows == 2 * 4

    # runs that no ablation made are measured when they are read, and come out the same
    runs = [folder / f"sampling.max_new_tokens={n}" / "seed-1" / "run" for n in (4, 6)]
    for one, trial in zip(read_folders(runs), trials, strict=True):
        assert one.result == {name: trial[name] for name in one.result}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_tune_the_results_are_those_of_a_sequence(tmp_path):
    vary = ("--vary", "kl.coef=0,0.1", "--seeds", "2", "--json")
    found = []
    for name, more in (("sequence", ()), ("tune", ("--parallel", "2"))):
        done = subprocess.run(
            command(tmp_path / name, *vary, *more), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)["trials"])
    for alone, on_tune in zip(*found, strict=True):
        assert alone | {"seconds": 0} == on_tune | {"seconds": 0}
