"""Faults in real runs: what the doctor says of them."""

import pytest

from klinic.checks import CHECKS
from klinic.doctor.cases import read_cases
from klinic.doctor.diagnosis import diagnose
from klinic.faults import FAULTS
from klinic.lab.scoreboard_run import train_trial

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]


def check_named(fault, folder, **how):
    found = diagnose(read_cases(train_trial(folder, fault, **how)), CHECKS)
    assert found.cause == fault.cause
    assert not fault.visible_at_start or found.first_step == 1


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.cause)
def test_every_fault_is_named(fault, tmp_path):
    check_named(fault, tmp_path / "sick")


def test_a_healthy_run_has_no_cause(tmp_path):
    assert diagnose(read_cases(train_trial(tmp_path / "well")), CHECKS).cause is None
