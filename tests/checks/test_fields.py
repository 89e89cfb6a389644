"""Checks read fields that exist, and the reference page explains every field."""

from dataclasses import fields
from pathlib import Path

import pytest

from klinic.checks import CHECKS
from klinic.evidence.fields import FACTS, METRICS, PROBES, RUN_KEYS
from klinic.evidence.record import StepRecord

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "evidence.md"
RECORD_FIELDS = [field.name for field in fields(StepRecord)]
PLACES = {
    "record": RECORD_FIELDS,
    "facts": FACTS,
    "run": RUN_KEYS,
    "metrics": METRICS,
    "probes": PROBES,
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_check_reads_fields_that_exist(check):
    fields_read = check.all_fields
    assert fields_read
    assert len(set(fields_read)) == len(fields_read)
    for need in fields_read:
        place, _, name = need.partition(".")
        assert name in PLACES[place], need


def test_every_field_is_there_for_a_check():
    needed = {need for check in CHECKS for need in check.all_fields}
    idle = {f"{place}.{name}" for place, names in PLACES.items() for name in names} - needed
    assert idle == {
        "record.step",
        "record.facts",
        *(f"run.{key}" for key in ("schema", "klinic", "created", "seed", "threads", "versions")),
        *(f"run.{key}" for key in ("shards", "processes")),
        "metrics.teacher/kl",
    }


@pytest.mark.parametrize("place", PLACES)
def test_the_page_explains_every_name(place):
    rows = PAGE.read_text().splitlines()
    for name in PLACES[place]:
        assert any(row.startswith(f"| `{name}` |") for row in rows), name


@pytest.mark.parametrize("known", [FACTS, RUN_KEYS, METRICS, PROBES])
def test_the_page_and_the_code_say_the_same(known):
    page = PAGE.read_text()
    for name, meaning in known.items():
        assert f"| `{name}` | {meaning} |" in page
