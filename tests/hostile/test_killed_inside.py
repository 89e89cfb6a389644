"""Kills inside the write-ahead of recovery, the supervisor and `--resume`: the same bytes come out.

A sitecustomize.py that only these tests put on the path kills a process before or after the n-th
call of a function. Each kill comes once, so the run that is resumed gets beyond it.
"""

import json
import shutil

import pytest

from fixture_run import SCHEMA_1
from killed_commands import finish, start
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import read_tokens
from run_differences import evidence_differences

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(1800)]

KILLER = """
import importlib.machinery, json, os, signal, sys
from pathlib import Path

KILLS = json.loads(os.environ["TEST_KILLS"])
MARKS = Path(os.environ["TEST_KILL_MARKS"])


def die(number):
    try:
        (MARKS / str(number)).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def is_next(number):
    return all((MARKS / str(n)).exists() for n in range(number))


def patch(module, number, name, when, nth):
    *owners, last = name.split(".")
    owner = module
    for part in owners:
        owner = getattr(owner, part)
    real, calls = getattr(owner, last), [0]

    def killing(*args, **kwargs):
        counts = is_next(number)
        calls[0] += counts
        if counts and calls[0] == nth and when == "before":
            die(number)
        result = real(*args, **kwargs)
        if counts and calls[0] == nth and when == "after":
            die(number)
        return result

    setattr(owner, last, killing)


class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        mine = [(n, *k) for n, k in enumerate(KILLS) if k[0] == name]
        spec = super().find_spec(name, path, target) if mine else None
        if spec is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                for number, _, function, when, nth in mine:
                    patch(module, number, function, when, nth)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder)
"""
REWARDS = """
SPOILT = {spoilt!r}

def scored(prompts, completions, answer, **_):
    values = [0.8 + 0.1 * (len(text) % 2) for text in completions]
    bad = [prompt in SPOILT for prompt in prompts]
    return [v * 1e6 if b else v for v, b in zip(values, bad)]
"""
RECIPE = """
model: {folder}/model
seed: 3
threads: 1
data: {{task: arithmetic}}
kl: {{coef: 0.05}}
rewards: ['{folder}/rewards.py:scored']
recovery: {{grad_norm_limit: 20}}
sampling: {{max_new_tokens: 6}}
loop: {{max_steps: 17, prompts_per_step: 4, group_size: 4, checkpoint_every: 2, eval_every: 5,
       eval_prompts: 4}}
learner: {{learning_rate: 1e-3, micro_batch_size: 16}}
output: {{trackers: []}}
"""
RECOVERING, RUN, RESUMING = (
    "klinic.training.recovery",
    "klinic.training.run",
    "klinic.training.resume",
)
CHECKPOINT, SUPERVISE = "klinic.training.checkpoint", "klinic.cli.supervisor"
RUN_LOG, RUN_CHECKPOINTS = "klinic.training.run_log", "klinic.training.run_checkpoints"
FIRST = (
    RUN,
    "Run.record_step",
    "after",
    8,
)  # takes the process that trains, and leaves the supervisor
ALONE = (SUPERVISE, "_RestartHistory.add_loss", "before", 1)  # takes the supervisor after that
MOMENTS = {
    "recovery": [
        *[
            [(RECOVERING, "RecoveryManager._save_plan", when, n)]
            for when in ("before", "after")
            for n in (1, 2)
        ],
        *[[(RECOVERING, "RecoveryManager._save_plan", when, 4)] for when in ("before", "after")],
        [(RUN_LOG, "RunLog.discard_attempt", "after", 1)],
        [(RUN, "Run.roll_back", "before", 1)],
        [(RUN_CHECKPOINTS, "RunCheckpoints.restore_finite", "after", 1)],
        [(CHECKPOINT, "remove_after", "after", 1)],
        [(RUN, "Run.discard_after", "after", 1)],
        [(RECOVERING, "RecoveryManager.finish_rollback", "after", 1)],
    ],
    "supervisor": [
        [FIRST, ALONE],
        [FIRST, (SUPERVISE, "_RestartHistory._write_event", "before", 1)],
        [FIRST, (SUPERVISE, "_RestartHistory._write_event", "after", 1)],
        [FIRST, (SUPERVISE, "_ChildProcess.run_command", "before", 1)],
    ],
    "resume": [
        [FIRST, ALONE, (RESUMING, "find_resume_point", "after", 1)],
        [FIRST, ALONE, (RUN, "Run.restore", "after", 1)],
        [FIRST, (CHECKPOINT, "remove_unfinished", "before", 1)],
        [FIRST, ALONE, (CHECKPOINT, "remove_after", "after", 1)],
        [FIRST, (RUN, "Run.discard_after", "after", 1)],
        [FIRST, ALONE, ("klinic.doctor.live", "LiveDoctor.restore", "before", 1)],
        [FIRST, ("klinic.doctor.live", "LiveDoctor.restore", "after", 1)],
        [(RECOVERING, "RecoveryManager._save_plan", "after", 4), (RUN, "Run.restore", "after", 1)],
        [(RUN, "Run.roll_back", "before", 1), (CHECKPOINT, "remove_after", "after", 1)],
    ],
}
CASES = [(where, kills) for where, list_ in MOMENTS.items() for kills in list_]


def name_of(value):
    if isinstance(value, str):
        return value
    return " then ".join(f"{when} {name} {nth}" for _, name, when, nth in value)


def prepare(folder, shared):
    folder.mkdir()
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=shared))
    return folder


def prompts_of(run, step):
    record, tokens = store.read_record(run, step), read_tokens(run)
    cuts = zip(record.prompt_offsets[:-1], record.prompt_offsets[1:], strict=True)
    return {"".join(tokens[i] for i in record.prompt_ids[a:b].tolist()) for a, b in cuts}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The model, and rewards that spoil two batches in a row: the second is rolled back."""
    shared = tmp_path_factory.mktemp("shared")
    shutil.copytree(SCHEMA_1 / "model", shared / "model")
    (shared / "rewards.py").write_text(REWARDS.format(spoilt=set()))
    clean = prepare(shared / "clean", shared)
    finish(start(clean, shared), clean, shared)
    spoilt = prompts_of(clean / "run", 14) | prompts_of(clean / "run", 15)
    (shared / "rewards.py").write_text(REWARDS.format(spoilt=spoilt))
    return shared


@pytest.fixture(scope="module")
def whole(shared):
    folder = prepare(shared / "whole", shared)
    finish(start(folder, shared), folder, shared)
    acts = [e["act"] for e in Journal(folder / "run" / "events.jsonl").entries() if "act" in e]
    assert acts == ["again", "skip", "again", "roll back"]
    return folder / "run"


@pytest.mark.parametrize(("where", "kills"), CASES, ids=name_of)
def test_a_kill_there_changes_nothing(tmp_path, monkeypatch, shared, whole, where, kills):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(KILLER)
    marks = tmp_path / "marks"
    marks.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    monkeypatch.setenv("TEST_KILLS", json.dumps(kills))
    monkeypatch.setenv("TEST_KILL_MARKS", str(marks))
    folder = prepare(tmp_path / "killed", shared)
    finish(start(folder, shared), folder, shared)
    assert len(list(marks.iterdir())) == len(kills), "a moment did not come"
    assert evidence_differences(whole, folder / "run") == []
