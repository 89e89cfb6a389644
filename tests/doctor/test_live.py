"""The doctor of a run that goes on: it says what it finds, and disturbs nothing."""

import json
from dataclasses import replace

import pytest

import klinic
from klinic.checks import CHECKS
from klinic.doctor import live
from klinic.errors import RunStoppedError
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import write_run_facts
from klinic.faults import misaligned_logp
from klinic.faults.base import Severity
from klinic.learner.local import LocalLearner
from klinic.training.run import Run
from run_differences import evidence_differences
from training.killing import differences

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("as_before")]
ROWS = [{"prompt": f"{n}+{m}="} for n in range(4) for m in range(4)]


def digits(prompts, completions, **columns):
    return [sum(c.isdigit() for c in text) + len(text) / 10 for text in completions]


def train(folder, max_steps=3, **settings):
    settings = {"output.trackers": [], "output.dir": str(folder), **settings}
    klinic.train(
        model="tiny",
        reward_funcs=digits,
        train_dataset=ROWS,
        max_steps=max_steps,
        prompts_per_step=4,
        group_size=4,
        max_new_tokens=6,
        kl_coef=0.05,
        threads=1,
        **settings,
    )
    return folder


def events(folder, name):
    return [e for e in Journal(folder / "events.jsonl").entries() if e["event"] == name]


def test_training_with_checks_that_all_throw_is_training_without_them(tmp_path, monkeypatch):
    calm = train(tmp_path / "without", **{"output.doctor": "none"})
    thrown = []

    def throw(case):
        thrown.append(case.record.step)
        raise ZeroDivisionError("of mine")

    broken = tuple(replace(check, needs=(), optional_needs=(), judge=throw) for check in CHECKS)
    plain = live.LiveDoctor.__init__
    monkeypatch.setattr(
        live.LiveDoctor,
        "__init__",
        lambda doctor, folder, **rows: plain(doctor, folder, broken, **rows),
    )
    loud = train(tmp_path / "throwing")
    # one column is written only where somebody looks at it, and a doctor saves what it knows
    assert {d.partition(": ")[2] for d in differences(calm, loud)} <= {"round_trip", "doctor"}
    assert not events(loud, "diagnosis")
    assert len(thrown) == 3 * len(CHECKS)


def test_a_cause_is_told_once_and_written_down(tmp_path):
    with misaligned_logp.shift_sampler_logps(Severity.NORMAL):
        folder = train(tmp_path / "sick")
    (told,) = events(folder, "diagnosis")
    assert told["cause"] == "misaligned-logp"
    assert told["step"] == 1
    assert "Fix: Store the log-prob of token t" in told["says"]
    written = json.loads((folder / "diagnosis.json").read_text())
    assert written["cause"] == "misaligned-logp"
    assert written["first_step"] == 1


@pytest.mark.parametrize(("back_to", "left"), [(0, False), (2, False), (3, True)])
def test_a_diagnosis_goes_with_the_steps_that_it_is_about(tmp_path, back_to, left):
    write_run_facts(tmp_path, {"eos_ids": [1]})
    written = tmp_path / "diagnosis.json"
    written.write_text('{"cause": "misaligned-logp", "first_step": 3}')
    doctor = live.LiveDoctor(tmp_path)
    doctor.restart_after(back_to)
    doctor.close()
    assert written.exists() == left


def test_a_run_that_is_to_stop_at_a_cause_does(tmp_path):
    with (
        misaligned_logp.shift_sampler_logps(Severity.NORMAL),
        pytest.raises(RunStoppedError, match="Cause: misaligned-logp"),
    ):
        train(tmp_path / "sick", max_steps=9, **{"output.doctor": "stop"})
    steps = [e["step"] for e in Journal(tmp_path / "sick" / "metrics.jsonl").entries()]
    assert max(steps) == 2


def test_questions_are_asked_after_1_2_4_steps_and_forgotten_with_their_step(tmp_path):
    folder = train(tmp_path / "run", 5, **{"loop.checkpoint_every": 2, "output.doctor": "tell"})
    asked = [(e["step"], e["probe"]) for e in Journal(folder / "probes.jsonl").entries()]
    assert {step for step, _ in asked} == {1, 2, 4}
    assert (1, "rescore") in asked
    assert (2, "kl_gradient") in asked


class InterruptedRunError(Exception):
    """As a kill would, it comes at any moment and leaves what is on disk."""


@pytest.mark.parametrize("killed_at", [2, 6])
@pytest.mark.parametrize("records_every", [1, 3])
def test_probes_and_findings_after_a_resume_are_those_of_the_undisturbed_run(
    tmp_path, monkeypatch, killed_at, records_every
):
    """Killed before its first checkpoint but that of step 0, and between two others."""
    how = {
        "loop.checkpoint_every": 4,
        "recovery": {},
        "output.doctor": "tell",
        "output.records_every": records_every,
    }
    folders = [tmp_path / name / "run" for name in ("whole", "killed")]
    with misaligned_logp.shift_sampler_logps(Severity.NORMAL):
        train(folders[0], 9, **how)
        with monkeypatch.context() as patched:
            interrupt(patched, at=killed_at)
            with pytest.raises(InterruptedRunError):
                train(folders[1], 9, **how)
        train(folders[1], 9, resume=True, **how)
    assert evidence_differences(*folders) == []
    asked = {e["step"] for e in Journal(folders[0] / "probes.jsonl").entries()}
    assert asked > {1, 2, 4, 8}  # and where a check had failed


def interrupt(patched, at):
    """End a run as soon as it has written a step down."""
    keep = Run.record_step

    def interrupted(self, done, state):
        goes_on = keep(self, done, state)
        if done.step == at:
            raise InterruptedRunError
        return goes_on

    patched.setattr(Run, "record_step", interrupted)


def test_a_question_that_cannot_be_answered_is_an_event(tmp_path, monkeypatch):
    def unable(self, record, *, kl_coef):
        raise MemoryError(f"of step {record.step}")

    monkeypatch.setattr(LocalLearner, "probe", unable)
    (told,) = events(train(tmp_path / "run", 1), "probe failed")
    assert told["says"] == "A probe failed: MemoryError: of step 1"
