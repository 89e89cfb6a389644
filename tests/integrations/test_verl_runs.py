"""Real runs of verl on CPUs with klinic's one line; `verl_runs/launch.py` describes them.

KLINIC_VERL_PYTHON=ENV/bin/python pytest -m slow tests/integrations/test_verl_runs.py
"""

import os

import pytest

from integrations.verl_runs.launch import FAULTS, Launch, run_verl
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import EVENTS

PYTHON = os.environ.get("KLINIC_VERL_PYTHON", "")
SAME = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean")
MULTI_TURN = "environment-tokens"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not PYTHON, reason="KLINIC_VERL_PYTHON names no interpreter with verl"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("verl")


def run(folder, name, **options):
    outcome = run_verl(PYTHON, folder / name, Launch(**options))
    assert outcome.returncode == 0, outcome.text[-3000:]
    return outcome


def named_causes(run_folder):
    events = Journal(run_folder / EVENTS).entries()
    return {event["cause"] for event in events if event["event"] == "diagnosis"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_losses_are_those_of_a_run_without_klinic_and_a_healthy_run_is_quiet(folder, ranks):
    with_klinic = run(folder, f"healthy-{ranks}", ranks=ranks)
    without = run(folder, f"without-{ranks}", ranks=ranks, klinic=False)
    assert len(with_klinic.metrics) == 6
    for one, other in zip(with_klinic.metrics, without.metrics, strict=True):
        # verl keeps the rows of a step in the order in which they ended: sums differ by rounding
        expected = pytest.approx([other[name] for name in SAME], rel=1e-5, abs=1e-6)
        assert [one[name] for name in SAME] == expected
    assert "6 steps examined: no cause was found" in with_klinic.text


def test_a_healthy_run_of_several_turns_is_quiet(folder):
    assert "no cause was found" in run(folder, "turns", agent=True).text


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_nothing_else(folder, fault):
    name = f"fault-{fault}"
    run(folder, name, fault=fault, agent=fault == MULTI_TURN)
    assert named_causes(folder / name / "klinic") == {FAULTS[fault]}
