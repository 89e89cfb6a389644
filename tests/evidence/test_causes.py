"""Every cause can be told apart by fields that exist, and the reference page knows them all."""

from dataclasses import fields
from pathlib import Path

import pytest

from klinic.evidence.causes import CAUSES
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


def test_causes_are_numbered_and_have_names_of_their_own():
    assert [cause.id for cause in CAUSES] == [f"R{n}" for n in range(1, 36)]
    assert len({cause.name for cause in CAUSES}) == 35


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_a_cause_needs_fields_that_exist(cause):
    assert cause.needs or cause.left_out
    assert len(set(cause.needs)) == len(cause.needs)
    for need in cause.needs:
        place, _, name = need.partition(".")
        assert name in PLACES[place], need


def test_every_field_is_there_for_a_cause():
    needed = {need for cause in CAUSES for need in cause.needs}
    idle = {f"{place}.{name}" for place, names in PLACES.items() for name in names} - needed
    assert idle == {
        "record.step",
        "record.facts",
        *(
            f"run.{key}"
            for key in ("schema", "klinic", "created", "seed", "threads", "versions", "shards")
        ),
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


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_the_page_says_what_a_cause_needs(cause):
    needs = ", ".join(f"`{need}`" for need in cause.needs)
    left_out = f" Left out: {cause.left_out}." if cause.left_out else ""
    row = f"| `{cause.name}` | {cause.description} | {needs}.{left_out} |"
    assert row in PAGE.read_text()
