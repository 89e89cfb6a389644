"""The completion that shows a cause is chosen by the kind of its evidence, and is readable."""

import re
from dataclasses import replace

import numpy as np
import pytest
from made import record, run_folder

from klinic.checks import CHECKS
from klinic.checks.base import Case
from klinic.evidence.record import EmittedBy
from klinic.evidence.store import write_record
from klinic.report.cause_rows import BY_CAUSE, IN_NO_COMPLETION, find_evidence_row
from klinic.report.evidence_row import EvidenceRow
from klinic.report.page import render
from klinic.report.reading import read_run_report
from klinic.report.shown_completion import show_completion
from klinic.report.token_table import step_tokens

LENGTHS = (3, 5, 4)
EOS = 1


def changed(column, index, value, **others):
    """Return a record in which one value of a column is another."""
    made = record(lengths=LENGTHS)
    array = np.array(others.pop("start", getattr(made, column)))
    array[index] = value
    return replace(made, **{column: array}, **others)


def emitted_by_policy():
    return np.full(sum(LENGTHS), int(EmittedBy.POLICY))


def without_ends(made):
    return np.where(made.token_ids == EOS, EOS + 1, made.token_ids)


CASES = {
    "foreign token": (
        "wrong-loss-mask",
        changed("emitted_by", 9, int(EmittedBy.TOOL), start=emitted_by_policy()),
        {},
        EvidenceRow(row=2, tokens=(1,), reason="1 of its 4 trained tokens is not the policy's"),
    ),
    "left out": (
        "wrong-loss-mask",
        changed("loss_mask", [4, 5], False, emitted_by=emitted_by_policy()),
        {},
        EvidenceRow(
            row=1, tokens=(1, 2), reason="2 of the policy's 5 tokens in it are not trained on"
        ),
    ),
    "goes on": (
        "stop-token-fault",
        changed("token_ids", 4, EOS, start=without_ends(record(lengths=LENGTHS))),
        {"eos_ids": [EOS]},
        EvidenceRow(row=1, tokens=(1,), reason="it goes on after an end token"),
    ),
    "cut at its end": (
        "stop-token-fault",
        changed(
            "token_ids",
            11,
            EOS,
            start=without_ends(record(lengths=LENGTHS)),
            finish_reason=np.array(["stop", "length", "length"]),
        ),
        {"eos_ids": [EOS]},
        EvidenceRow(row=2, tokens=(3,), reason="it ends with an end token and counts as cut off"),
    ),
    "cut off": (
        "context-truncated",
        replace(record(lengths=LENGTHS), finish_reason=np.array(["length", "stop", "length"])),
        {},
        EvidenceRow(row=2, tokens=(3,), reason="it was cut off after 4 tokens"),
    ),
    "advantage": (
        "advantage-explodes",
        replace(record(lengths=LENGTHS), advantage=np.array([0.5, -2.0, 1.5])),
        {},
        EvidenceRow(row=1, reason="its advantage of -2 is the largest of the step in size"),
    ),
    "sum of a group": (
        "wrong-groups",
        replace(
            record(lengths=(2,) * 4),
            group=np.array([-7, -7, 5, 5]),
            advantage=np.array([-3.0, 3.0, 1.0, 2.0]),
        ),
        {},
        EvidenceRow(row=3, reason="the advantages of its group of 2 sum to 3, not 0"),
    ),
    "opposed": (
        "wrong-groups",
        replace(
            record(lengths=(2,) * 4),
            group=np.array([0, 0, 1, 1]),
            reward=np.array([1.0, 0.0, 1.0, 0.0]),
            advantage=np.array([1.0, -1.0, -1.0, 1.0]),
        ),
        {},
        EvidenceRow(
            row=2,
            reason="its reward of 1 is above the mean of its group, 0.5, and its advantage is -1",
        ),
    ),
    "no advantage at a token": (
        "misplaced-advantage",
        changed("token_advantage", [4, 5], 0.0, start=np.ones(sum(LENGTHS))),
        {},
        EvidenceRow(row=1, tokens=(1, 2), reason="the advantage of 2 of its 5 trained tokens is 0"),
    ),
    "equal completions, other rewards": (
        "broken-reward",
        replace(
            record(lengths=(2,) * 4),
            token_ids=np.array([4, 5, 6, 7, 6, 7, 6, 7]),
            group=np.array([0, 1, 1, 2]),
            reward=np.array([9.0, 0.25, 1.0, 3.0]),
        ),
        {},
        EvidenceRow(
            row=2,
            twin=1,
            reason="completion 1 has the same prompt and the same tokens; this one got the reward "
            "1, that one 0.25",
        ),
    ),
    "no reward": (
        "broken-reward",
        replace(record(lengths=LENGTHS), reward=np.array([0.0, np.nan, 1.0])),
        {},
        EvidenceRow(row=1, reason="it has no reward"),
    ),
    "equal rewards": (
        "equal-rewards",
        replace(
            record(lengths=(2,) * 4),
            token_ids=np.array([4, 5, 4, 5, 6, 7, 8, 9]),
            group=np.array([0, 0, 1, 1]),
            reward=np.array([1.0, 1.0, 0.0, 0.0]),
        ),
        {},
        EvidenceRow(
            row=2, reason="all 2 completions of its prompt, 2 of them different, got the reward 0"
        ),
    ),
    "equal completions": (
        "broken-sampler",
        replace(
            record(lengths=(2,) * 4),
            token_ids=np.array([4, 5, 6, 7, 6, 7, 6, 7]),
            group=np.array([0, 1, 1, 1]),
        ),
        {"vocabulary_size": 30},
        EvidenceRow(row=1, twin=2, reason="3 completions of its prompt have the same 2 tokens"),
    ),
    "id outside": (
        "broken-sampler",
        changed("token_ids", 6, 99),
        {"vocabulary_size": 30},
        EvidenceRow(row=1, tokens=(3,), reason="1 of its ids is outside the vocabulary of 30"),
    ),
    "highest reward": (
        "reward-hacking",
        replace(record(lengths=LENGTHS), reward=np.array([0.0, 1.0, 1.0])),
        {},
        EvidenceRow(
            row=1,
            reason="its reward of 1 is the highest of the step, which 2 of 3 completions have",
        ),
    ),
    "lowest reward": (
        "cliff-rewards",
        replace(record(lengths=LENGTHS), reward=np.array([1.0, np.nan, -1.0])),
        {},
        EvidenceRow(
            row=2,
            reason="its reward of -1 is the lowest of the step, which 1 of 3 completions have",
        ),
    ),
    "above 0": (
        "unnormalised-logp",
        changed("logp_ref", 5, 0.75),
        {},
        EvidenceRow(row=1, tokens=(2,), reason="its token 2 has a log-prob of 0.75, above 0"),
    ),
    "not finite": (
        "nan-outside-mask",
        changed("logp_old", 10, np.nan, loss_mask=np.arange(sum(LENGTHS)) != 10),
        {},
        EvidenceRow(
            row=2,
            tokens=(2,),
            reason="values at 1 of its tokens that are not trained on are not finite",
        ),
    ),
    "text encoded again": (
        "retokenised",
        replace(record(lengths=LENGTHS), round_trip=np.array([True, True, False])),
        {},
        EvidenceRow(row=2, reason="its text, encoded again, gives other token ids"),
    ),
    "other prompt": (
        "prompt-mismatch",
        replace(record(lengths=LENGTHS), prompt_ids_match=np.array([True, False, False])),
        {},
        EvidenceRow(row=1, reason="the sampler received another prompt"),
    ),
    "old samples": (
        "samples-too-old",
        replace(
            record(lengths=LENGTHS),
            weight_version=np.repeat([6, 7, 2], LENGTHS),
            facts={"learner_version": 7},
        ),
        {},
        EvidenceRow(row=2, tokens=(0,), reason="weights of 5 updates before this step sampled it"),
    ),
    "gap to the sampler": (
        "stale-sampler",
        changed("logp_sampler", 4, -50.0),
        {},
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_cause_is_shown_by_its_kind_of_evidence(name):
    cause, made, run, expected = CASES[name]
    found = find_evidence_row(cause, Case(record=made, run=run))
    if expected is None:
        assert (found.row, found.tokens) == (1, (1,))
        assert "largest mean gap of the step between policy and sampler" in found.reason
    else:
        assert found == expected


def test_the_kl_of_one_token_selects_its_completion():
    made = changed("logp_ref", 9, 40.0)
    found = find_evidence_row("kl-tail-dominates", Case(record=made))
    assert (found.row, found.tokens) == (2, (1,))
    assert found.reason.startswith("its token 1 alone has 100% of the step's KL")


def test_every_check_has_a_kind_of_evidence_or_a_reason_why_no_completion_shows_it():
    names = {check.name for check in CHECKS}
    assert BY_CAUSE.keys() | IN_NO_COMPLETION.keys() == names
    assert not BY_CAUSE.keys() & IN_NO_COMPLETION.keys()


@pytest.mark.parametrize("cause", BY_CAUSE)
def test_no_completion_is_shown_where_none_has_the_evidence(cause):
    made = replace(
        record(lengths=LENGTHS, moved=0.0),
        reward=None,
        logp_ref=None,
        finish_reason=np.array(["stop", "stop", "stop"]),
    )
    made = replace(made, token_ids=np.arange(made.num_tokens) + 5)
    assert find_evidence_row(cause, Case(record=made, run={"eos_ids": [EOS]})) is None


@pytest.mark.parametrize("cause", BY_CAUSE)
@pytest.mark.parametrize(
    "run", [{}, {"eos_ids": "1", "vocabulary_size": "many"}, {"eos_ids": [None, 2**80, "x", 1.5]}]
)
def test_any_contents_of_run_json_and_empty_rows_are_read(cause, run):
    made = replace(
        record(lengths=(0, 3, 0)),
        facts={"learner_version": "seven"},
        weight_version=np.zeros(3, int),
        finish_reason=np.array(["", "length", "stop"]),
        advantage=np.array([np.nan, np.inf, 1e308]),
        entropy=np.array([np.inf, np.nan, 1e300]),
    )
    find_evidence_row(cause, Case(record=made, run=run))
    empty = record(lengths=())
    assert find_evidence_row(cause, Case(record=empty, run=run)) is None


def test_the_marked_tokens_of_a_long_completion_are_in_its_text():
    made = record(lengths=(900,))
    shown = show_completion(
        made, {i: f"<{i}>" for i in range(30)}, EvidenceRow(row=0, reason="", tokens=(500, 501))
    )
    marked = [part.text for part in shown.parts if part.is_marked]
    assert marked == ["".join(f"<{i}>" for i in made.token_ids[500:502])]
    assert (shown.num_before, shown.num_after, shown.token) == (420, 240, 500)


def test_what_is_only_rounding_is_0():
    made = replace(record(lengths=LENGTHS), advantage=np.array([6.34e-17, 1e-9, -1.0]))
    rows = step_tokens(made, {}, num_tokens=99, num_rows=9).rows
    assert {row.row: row.facts["advantage"] for row in rows} == {0: 0.0, 1: 1e-9, 2: -1.0}
    shown = show_completion(made, {}, EvidenceRow(row=0, reason=""))
    assert "advantage 0" in shown.facts


def tool_in(made, row):
    """Return a record in which a tool wrote the second token of a row, which is trained on."""
    emitted_by = np.full(made.num_tokens, int(EmittedBy.POLICY))
    emitted_by[made.row_offsets[row] + 1] = int(EmittedBy.TOOL)
    return replace(made, emitted_by=emitted_by)


def test_a_page_shows_the_completion_without_scripts(tmp_path):
    texts = {i: f"t{i} " for i in range(29)} | {29: "<b>last\n"}
    run = run_folder(tmp_path / "run", steps=4, texts=texts)
    for step in range(1, 5):
        made = tool_in(record(step, moved=0.4834), row=2)  # a KL of 0.1, as it is logged
        write_record(run, replace(made, token_ids=np.full(made.num_tokens, 29)))
    story = read_run_report(run)
    page = render([story])
    without_scripts = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert story.diagnosis.cause == "wrong-loss-mask"
    shown = story.shown["wrong-loss-mask"]
    assert (shown.step, shown.row, shown.token) == (1, 2, 1)
    assert 'href="#A-step-1-completion-2-token-1"' in without_scripts
    assert "1 of its 4 trained tokens is not the policy&#39;s" in without_scripts
    assert without_scripts.count("<mark>&lt;b&gt;last\u21b5\n</mark>") == 1
    measured = without_scripts.index("<dt>Measured</dt>")
    assert measured < without_scripts.index("<dt>What to change</dt>")
    assert without_scripts.index("<mark>") < without_scripts.index("<h2>Curves</h2>")


def test_the_token_view_holds_what_is_shown_also_of_a_long_step(tmp_path, monkeypatch):
    monkeypatch.setattr("klinic.report.reading.MAX_PAGE_ROWS", 4)
    run = run_folder(tmp_path / "run", steps=4)
    for step in range(1, 5):
        write_record(run, tool_in(record(step), row=1))
    story = read_run_report(run)
    assert [row.row for row in story.tokens[0].rows] == [1]


def test_each_failed_check_links_to_its_step_and_completion(tmp_path):
    run = run_folder(tmp_path / "run", steps=4)
    for step in range(1, 5):
        write_record(run, tool_in(record(step), row=1))
    story = read_run_report(run)
    page = render([story])
    failed = {h.check.name: h.first_step for h in story.diagnosis.hypotheses if h.num_failed}
    assert failed == {"wrong-loss-mask": 1, "wrong-metric": 1}
    for name, step in failed.items():
        line = re.search(rf"</span> <strong>{name}</strong>.*?</li>", page, re.S)[0]
        assert f'href="#A-step-{step}"' in line
        assert ('href="#A-step-1-completion-1-token-1"' in line) is (name == "wrong-loss-mask")


def test_a_cause_without_a_completion_says_where_it_is_instead(tmp_path):
    story = read_run_report(run_folder(tmp_path / "run", steps=6, apart=2.0))
    assert story.diagnosis.cause == "wrong-metric"
    assert "wrong-metric" not in story.shown
    assert f"In no single completion: {IN_NO_COMPLETION['wrong-metric']}." in render([story])
