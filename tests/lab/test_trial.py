"""Faults in real runs: what the doctor says of them."""

import io
import socket
import zipfile

import pytest

from klinic.checks import CHECKS
from klinic.cli.bundle import short_verdict
from klinic.doctor.cases import read_cases
from klinic.doctor.diagnosis import diagnose
from klinic.evidence.bundle import unpack_bundle, write_bundle
from klinic.faults import FAULTS
from klinic.lab.scoreboard_run import train_trial

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]


IDS_MATTER = ("broken-sampler", "stop-token-fault", "retokenised")


def check_named(fault, folder, **how):
    found = diagnose(read_cases(train_trial(folder, fault, **how)), CHECKS)
    assert found.cause == fault.cause
    assert not fault.visible_at_start or found.first_step == 1
    check_bundled(folder, found)


def check_bundled(run, found):
    """Compare the diagnosis of a run with that of its bundle, and look for texts in it."""
    contents = write_bundle(run, run.with_suffix(".zip"), verdict={}, anchors=[])
    with unpack_bundle(contents.path) as folder:
        again = diagnose(read_cases(folder), CHECKS)
    assert short_verdict(again) == short_verdict(found)
    assert [h.status for h in again.hypotheses] == [h.status for h in found.hypotheses]
    data = contents.path.read_bytes()
    recipe = (run / "recipe.yaml").read_text()
    for word in (str(run.parent), "arithmetic", "graduated", socket.gethostname()):
        assert word.encode() not in without_arrays(data), word
    assert "arithmetic" in recipe  # it would be seen


def without_arrays(data):
    """Return the JSON files of a bundle: random bytes of an array may spell any short word."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return b"".join(file.read(n) for n in file.namelist() if not n.endswith(".parquet"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.cause)
def test_every_fault_is_named(fault, tmp_path):
    check_named(fault, tmp_path / "sick")


@pytest.mark.parametrize("cause", IDS_MATTER)
def test_a_bundle_shows_the_fault_of_its_run(cause, tmp_path):
    check_named(next(fault for fault in FAULTS if fault.cause == cause), tmp_path / "sick")


def test_a_healthy_run_has_no_cause(tmp_path):
    found = diagnose(read_cases(train_trial(tmp_path / "well")), CHECKS)
    assert found.cause is None
    check_bundled(tmp_path / "well", found)
