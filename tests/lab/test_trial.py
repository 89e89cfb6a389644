"""Faults in real runs: what the doctor says of them."""

import pytest
import torch

from klinic.checks import CHECKS
from klinic.doctor.diagnosis import diagnose
from klinic.doctor.reading import read_cases
from klinic.faults import FAULTS
from klinic.lab.trial import make

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _as_before(cache, monkeypatch):
    """One warm start for all, and torch's settings as they were."""
    monkeypatch.setenv("KLINIC_CACHE", str(cache))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.cause)
def test_a_fault_is_named(fault, tmp_path):
    run = make(tmp_path / "sick", fault)
    assert diagnose(read_cases(run), CHECKS).cause == fault.cause


def test_a_healthy_run_has_no_cause(tmp_path):
    assert diagnose(read_cases(make(tmp_path / "well")), CHECKS).cause is None
