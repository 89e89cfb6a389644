"""What holds for every check: file, name, text, needs, and that it changes nothing."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from checks import exact_records
from checks.exact_records import RUN
from evidence.records import full_record
from klinic import checks
from klinic.checks import CHECKS, HYPOTHESES, Case, Verdict
from klinic.checks.base import passed_finding
from klinic.evidence.fields import METRICS, PROBES

FOLDER = Path(checks.__file__).parent
HEADINGS = ("Looks for", "Why it matters", "Confirmed when", "Ruled out when", "Confused with")
BY_NAME = {check.name: check for check in CHECKS}
ANSWERED = ("ratio", "cosine", "norm", "expected_norm", "score_norm", "looks_like", "same")
EVERY = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)


def test_every_file_is_in_the_catalogue_once():
    files = {path.stem for path in FOLDER.glob("*.py")} - {
        "__init__",
        "advantage_grouping",
        "base",
        "copied_samples",
        "equal_samples",
        "folded_ids",
        "gap_contexts",
        "gap_models",
        "gap_tokens",
        "loss_fit",
        "loss_models",
        "loss_values",
        "measures",
        "other_rows",
        "reference_distance",
        "repeated_draws",
        "repeated_rows",
        "reward_evidence",
        "reward_order",
        "row_texts",
        "run_on_texts",
        "sampler_sync",
    }
    assert files == {check.name.replace("-", "_") for check in CHECKS}
    assert len(BY_NAME) == len(CHECKS)


@EVERY
def test_its_text_has_every_heading_and_its_file_begins_with_its_name(check):
    lines = check.help_text.splitlines()
    assert [line for line in lines if line in HEADINGS] == list(HEADINGS)
    source = (FOLDER / f"{check.name.replace('-', '_')}.py").read_text()
    assert source.startswith(f'"""{check.name}: ')
    assert check.fix.endswith(".")


@EVERY
def test_what_it_explains_exists(check):
    assert set(check.explains) <= set(BY_NAME)
    assert check.name not in check.explains


def test_nothing_explains_what_explains_it():
    def follow(name, way):
        for effect in BY_NAME[name].explains:
            assert effect not in way, (*way, effect)
            follow(effect, (*way, effect))

    for name in BY_NAME:
        follow(name, (name,))


def test_hypotheses_are_checks():
    assert {name for names in HYPOTHESES.values() for name in names} <= set(BY_NAME)


ODD = {
    "no tokens": full_record(lengths=(0, 0)),
    "nothing trained on": replace(full_record(), loss_mask=np.zeros(5, bool)),
    "not a number": replace(full_record(), logp_sampler=np.full(5, np.nan)),
    "one row": full_record(lengths=(4,)),
    "long": full_record(lengths=(40,) * 8),
}


@EVERY
@pytest.mark.parametrize("name", ODD)
def test_it_judges_every_legal_record(check, name):
    found = ODD[name]
    answers = {question: dict.fromkeys(ANSWERED) | {"largest": 0.0} for question in PROBES}
    metrics = {found.step: dict.fromkeys(("kl", "reward", "entropy", "grad_norm"), 0.1)}
    for version in (0, 3):
        facts = {**found.facts, "learner_version": version, "loss": 0.1, "grad_norm": 1.0}
        record = replace(found, facts=facts)
        case = Case(
            record=record,
            earlier=(record, record),
            start=record,
            run=RUN,
            metrics=metrics,
            probe_results=answers,
        )
        assert check(case).summary


@EVERY
def test_each_missing_field_gives_no_data_and_is_named(check):
    for need in check.needs:
        case = without(Case(record=full_record()), need)
        finding = check(case)
        assert finding.verdict is Verdict.NO_DATA
        assert f"`{need}`" in finding.summary


def test_what_it_looks_at_besides_keeps_it_from_passing():
    for check in (c for c in CHECKS if c.optional_needs):
        assert all(need not in check.needs for need in check.optional_needs)
        passes = replace(check, needs=(), judge=lambda _: passed_finding("well"))
        bare = replace(full_record(), logp_sampler=None, entropy=None, facts={})
        assert passes(Case(record=bare)).verdict is Verdict.NO_DATA


def without(case, need):
    place, _, name = need.partition(".")
    if place == "facts":
        facts = {key: value for key, value in case.record.facts.items() if key != name}
        return replace(case, record=replace(case.record, facts=facts))
    if place != "record":
        return case  # a bare case has no facts of these kinds
    optional = {f.name for f in fields(case.record) if f.default is None}
    if name not in optional:
        pytest.skip(f"{name} is in every record")
    names = ("prompt_ids", "prompt_offsets") if name == "prompt_ids" else (name,)
    return replace(case, record=replace(case.record, **dict.fromkeys(names)))


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
    confused = check.help_text.partition("Confused with")[2]
    known = set(BY_NAME)
    for name in re.findall(r"\b[a-z]+(?:-[a-z]+)+(?= \()", confused):
        assert name in known, name


class Spied(dict):
    """A line of metrics that remembers which of them were asked for."""

    asked: ClassVar[set[str]] = set()

    def get(self, name, default=None):
        self.asked.add(name)
        return super().get(name, default)

    def __getitem__(self, name):
        self.asked.add(name)
        return super().__getitem__(name)


def test_the_format_lists_every_metric_that_a_check_reads():
    steps = [exact_records.record(step=step, version=step - 1) for step in (1, 2)]
    metrics = {step: Spied(dict.fromkeys(METRICS, 1.0)) for step in (1, 2)}
    case = exact_records.case(steps[1], earlier=steps[:1], start=steps[0], metrics=metrics)
    for check in CHECKS:
        check(case)
    assert {"discarded", "reward_scale"} <= Spied.asked <= METRICS.keys()
