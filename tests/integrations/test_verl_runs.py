"""Real runs of verl on CPUs with klinic's one line; `verl_runs/launch.py` describes them.

KLINIC_VERL_PYTHON=ENV/bin/python pytest -m slow tests/integrations/test_verl_runs.py
"""

import os

import pytest

from integrations.verl_runs.launch import FAULTS, Launch, run_verl
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import EVENTS

PYTHON = os.environ.get("KLINIC_VERL_PYTHON", "")
SAME = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean")
LAUNCHES = {
    "turns": Launch(faults=("healthy", "environment-tokens"), agent=True),
    "bf16": Launch(faults=("bf16",), has_bf16=True),
    "one turn": Launch(
        faults=(
            *("healthy", "shifted-logp", "temperature", "skipped-sync"),
            *("wrong-groups", "noisy-reward", "stop-token"),
        )
    ),
}
"""Trainings by launch: those of one configuration follow each other in the same processes."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not PYTHON, reason="KLINIC_VERL_PYTHON names no interpreter with verl"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("verl")


def run(folder, launch):
    outcome = run_verl(PYTHON, folder, launch)
    assert outcome.returncode == 0, outcome.text[-3000:]
    return outcome


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_losses_are_those_of_a_training_without_klinic(folder, ranks):
    # in verl's own order of rows, that in which they ended, sums are rounded differently
    faults = ("without", "without", "healthy")
    launch_folder = folder / f"ranks-{ranks}"
    launch = Launch(ranks=ranks, has_sorted_rows=True, faults=faults)
    steps = [[step[name] for name in SAME] for step in run(launch_folder, launch).metrics]
    assert len(steps) == 3 * 6
    assert steps[:6] == steps[6:12]
    assert steps[:6] == steps[12:]
    assert not named_causes(launch_folder / "healthy")


@pytest.fixture(scope="module", params=LAUNCHES)
def causes(request, folder):
    """The causes that were named in the trainings of a launch."""
    launch, launch_folder = LAUNCHES[request.param], folder / request.param
    run(launch_folder, launch)
    return {fault: named_causes(launch_folder / fault) for fault in launch.faults}


def named_causes(run_folder):
    assert len(store.complete_steps(run_folder)) == 6
    events = Journal(run_folder / EVENTS).entries()
    return {event["cause"] for event in events if event["event"] == "diagnosis"}


def test_a_fault_is_named_and_nothing_else(causes):
    expected = {fault: {FAULTS[fault]} if fault in FAULTS else set() for fault in causes}
    assert causes == expected
