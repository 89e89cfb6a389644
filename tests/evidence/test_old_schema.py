"""Runs of the first schema stay readable, and are diagnosed as before."""

import json

import pytest

from fixture_run import copy_fixture
from klinic.checks import CHECKS
from klinic.doctor.cases import read_cases
from klinic.doctor.diagnosis import diagnose
from klinic.errors import EvidenceError
from klinic.evidence import store
from klinic.evidence.run_facts import read_run_facts
from klinic.evidence.schema_version import SCHEMA


@pytest.fixture
def old_run(tmp_path):
    return copy_fixture(tmp_path)


def test_an_old_run_is_read_without_the_new_fields(old_run):
    assert read_run_facts(old_run)["schema"] == 1 < SCHEMA
    steps = store.complete_steps(old_run)
    assert steps == [1, 2, 3, 4]
    for step in steps:
        record = store.read_record(old_run, step)
        assert record.logp_old is not None
        new = (record.process, record.loss_denominator, record.token_advantage, record.logp_teacher)
        assert new == (None, None, None, None)


def test_an_old_run_is_diagnosed(old_run):
    found = diagnose(read_cases(old_run), CHECKS)
    assert len(found.hypotheses) == len(CHECKS)


def test_a_new_step_beside_old_ones_is_read(old_run):
    record = store.read_record(old_run, 4)
    store.write_record(old_run, record)
    manifest = json.loads((store.step_folder(old_run, 4) / store.MANIFEST).read_text())
    assert manifest["schema"] == SCHEMA
    assert store.read_record(old_run, 4).num_rows == record.num_rows


def test_a_schema_before_the_first_is_refused(old_run):
    path = store.step_folder(old_run, 1) / store.MANIFEST
    manifest = {**json.loads(path.read_text()), "schema": 0}
    del manifest["digest"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(EvidenceError, match="has schema 0"):
        store.read_record(old_run, 1)
