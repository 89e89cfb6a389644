"""Faults of a teacher in real runs: what the doctor says of them."""

import pytest

from klinic.checks import CHECKS
from klinic.doctor.cases import read_cases
from klinic.doctor.diagnosis import diagnose
from klinic.faults.in_distillation import TEACHER_FAULTS, TEACHER_SETTINGS, competent_teacher
from klinic.lab.scoreboard_run import train_trial

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("warm"), pytest.mark.slow]

HEALTHY = {
    "beside rewards and a reference": {},
    "alone": {"teacher.alone": True, "kl": None},
    "two updates with unbiased": {
        "teacher.estimator": "unbiased",
        "learner.updates_per_batch": 2,
    },
    "topk in micro-batches": {"teacher.estimator": "topk", "learner.micro_batch_size": 16},
}


@pytest.mark.parametrize("fault", TEACHER_FAULTS, ids=lambda fault: fault.mechanism)
def test_every_fault_of_a_teacher_is_named(fault, tmp_path):
    found = diagnose(read_cases(train_trial(tmp_path / "sick", fault)), CHECKS)
    assert found.cause == fault.cause


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_with_a_teacher_has_no_cause(name, tmp_path):
    run = train_trial(tmp_path / "well", **{**TEACHER_SETTINGS, **HEALTHY[name]})
    assert diagnose(read_cases(run), CHECKS).cause is None


def test_a_teacher_that_knows_the_task_is_no_cause(tmp_path):
    with competent_teacher():
        run = train_trial(tmp_path / "well", **TEACHER_SETTINGS)
    assert diagnose(read_cases(run), CHECKS).cause is None
