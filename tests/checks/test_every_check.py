"""What holds for every check: file, name, text, needs, and that it changes nothing."""

import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from evidence.records import full_record
from klinic import checks
from klinic.checks import CHECKS, Case, Verdict
from klinic.evidence.causes import CAUSES

FOLDER = Path(checks.__file__).parent
HEADINGS = ("Looks for", "Why it matters", "Confirmed when", "Ruled out when", "Confused with")
BY_NAME = {check.name: check for check in CHECKS}
EVERY = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)


def test_every_file_is_in_the_catalogue_once():
    files = {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "base"}
    assert files == {check.name.replace("-", "_") for check in CHECKS}
    assert len(BY_NAME) == len(CHECKS)


def test_checks_are_named_after_causes_and_stand_in_their_order():
    order = [cause.name for cause in CAUSES]
    places = [order.index(check.name) for check in CHECKS]
    assert places == sorted(places)


@EVERY
def test_its_text_has_every_heading_and_its_file_begins_with_its_name(check):
    lines = check.text.splitlines()
    assert [line for line in lines if line in HEADINGS] == list(HEADINGS)
    source = (FOLDER / f"{check.name.replace('-', '_')}.py").read_text()
    assert source.startswith(f'"""{check.name}: ')
    assert check.fix.endswith(".")


@EVERY
def test_what_it_explains_exists(check):
    assert set(check.explains) <= {cause.name for cause in CAUSES}
    assert check.name not in check.explains


@EVERY
def test_each_missing_field_gives_no_data_and_is_named(check):
    for need in check.needs:
        case = without(Case(record=full_record()), need)
        finding = check(case)
        assert finding.verdict is Verdict.NO_DATA
        assert f"`{need}`" in finding.summary


def without(case, need):
    place, _, name = need.partition(".")
    if place != "record":
        return case  # a bare case has no facts of these kinds
    optional = {f.name for f in fields(case.record) if f.default is None}
    if name not in optional:
        pytest.skip(f"{name} is in every record")
    return replace(case, record=replace(case.record, **{name: None}))


@EVERY
def test_it_leaves_the_record_as_it_was(check):
    record = full_record()
    before = {
        f.name: np.copy(getattr(record, f.name)) for f in fields(record) if _is_array(record, f)
    }
    try:
        check(Case(record=record))
    except (KeyError, TypeError):
        pytest.skip("the record of this test means nothing to it")
    for name, values in before.items():
        np.testing.assert_array_equal(getattr(record, name), values)


def _is_array(record, field):
    return isinstance(getattr(record, field.name), np.ndarray)


@EVERY
def test_its_text_names_only_checks_and_causes_that_exist(check):
    confused = check.text.partition("Confused with")[2]
    known = {cause.name for cause in CAUSES}
    for name in re.findall(r"\b[a-z]+(?:-[a-z]+)+(?= \()", confused):
        assert name in known, name
