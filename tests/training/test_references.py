"""Runs whose reference moves: where the KL is 0, what is told, and how they go on."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import klinic
from klinic.errors import CheckpointError, PolicyError
from klinic.evidence import store
from klinic.evidence.files import Journal, read_json
from klinic.evidence.run_facts import read_run_facts
from klinic.maths.kl_coef import KLCoefState
from klinic.recipe.loading import from_keywords
from klinic.recipe.sections import ReferenceSection
from klinic.training import checkpoint, compare
from klinic.training.loop import run_loop
from klinic.training.reference_updates import fraction_to_keep, has_plateaued
from klinic.training.source import FROM_PYTHON, PythonInputs
from klinic.training.state import LoopState
from klinic.training.train import assemble_run, load_task_data
from model.foreign import write_adapter, write_base
from training.killing import differences, metrics

pytestmark = pytest.mark.timeout(240)
ROWS = [{"prompt": f"{n}+{m}="} for n in range(4) for m in range(4)]
SMALL = {
    "max_steps": 6,
    "prompts_per_step": 2,
    "group_size": 2,
    "max_new_tokens": 3,
    "learning_rate": 1e-2,
    "threads": 1,
    "output.trackers": [],
    "output.doctor": "none",
    "loop.checkpoint_every": 1,
    "loop.keep_checkpoints": 9,
    "kl_coef": 0.1,
}
RULES = {
    "ema": {"reference.ema": 0.5},
    "reset": {"reference.reset_every": 2},
    "reset_optimizer": {"reference.reset_every": 3, "reference.reset_optimizer": True},
    "plateau": {"reference.reset_every": 2, "reference.on_plateau": True},
}


def flat(prompts, completions, **columns):
    """Prefer every second completion: there is always something to learn, and never a gain."""
    return [float(number % 2) for number in range(len(completions))]


@pytest.fixture(autouse=True)
def _own_folder(as_before, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(folder, *, model="tiny", resume=False, **settings):
    return klinic.train(
        model=str(model),
        reward_funcs=flat,
        train_dataset=ROWS,
        resume=resume,
        **{**SMALL, "output.dir": folder, **settings},
    )


def by_step(folder, name):
    return {entry["step"]: entry[name] for entry in metrics(Path(folder)) if name in entry}


def facts(folder, step):
    return store.read_record(Path(folder), step).facts


def told(folder):
    entries = Journal(Path(folder) / "events.jsonl").entries()
    return [entry for entry in entries if entry["event"] == "reference"]


def cut_back(folder, step):
    """Leave of a run what a kill behind a checkpoint leaves: later ones never came to be."""
    checkpoint.remove_after(Path(folder), step)


@pytest.mark.parametrize(
    ("rule", "behind", "rank"),
    [
        ("ema", 4, None),
        ("ema", 4, 2),
        ("reset", 4, None),
        ("reset", 4, 2),
        ("reset_optimizer", 5, None),
        ("plateau", 5, None),
    ],
)
def test_a_run_that_goes_on_has_the_same_reference_and_is_the_same_run(rule, behind, rank):
    settings = {**RULES[rule], "lora_rank": rank}
    train("whole", **settings)
    shutil.copytree("whole", "parts")
    cut_back("parts", behind)
    train("parts", resume=True, **settings)
    if rank is not None:
        assert metrics(Path("whole")) == metrics(Path("parts"))
        assert equal("whole", "parts", "model/adapter_model.safetensors")
    else:
        assert differences(Path("whole"), Path("parts")) == []
    assert equal("whole", "parts", "reference.safetensors")
    for step in (5, 6):
        names = ("reference_digest", "reference_step")
        assert [facts("whole", step)[n] for n in names] == [facts("parts", step)[n] for n in names]
    assert told("whole") == told("parts")
    assert told("whole")[-1]["step"] == (1 if rule == "ema" else 6)
    assert state("whole") == state("parts")


def state(folder):
    found = read_json(last(folder) / "state.json")
    return {**found, "reference": {**found["reference"], "source": None}}


def last(folder):
    return Path(folder) / "checkpoints/step=000006"


def equal(one, other, name):
    a, b = (load_file(last(folder) / name) for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 2}], ids=["whole", "lora"])
def test_the_kl_is_0_at_the_start_and_again_after_every_reset(settings):
    train("run", **{"reference.reset_every": 2}, **settings)
    found = by_step("run", "kl")
    assert [step for step, value in found.items() if value == 0] == [1, 3, 5]
    for step in (1, 3, 5):
        record = store.read_record(Path("run"), step)
        assert np.array_equal(record.logp, record.logp_ref)
        assert record.facts["reference_step"] == step - 1
    assert facts("run", 4)["reference_digest"] == facts("run", 3)["reference_digest"]
    assert facts("run", 5)["reference_digest"] != facts("run", 3)["reference_digest"]
    to_start = by_step("run", "kl_to_start")
    assert list(to_start) == [3, 5]
    assert all(value > 0 for value in to_start.values())
    assert [entry["step"] for entry in told("run")] == [2, 4, 6]
    assert told("run")[0]["digest"] == facts("run", 3)["reference_digest"]
    kind = "adapter_frozen" if settings else "copy"
    about = read_run_facts(Path("run"))["reference"]
    assert (about["kind"], about["sync_every"], about["ema"]) == (kind, 2, None)
    subject = compare.find_subject("run")
    compare.evaluate_subject(subject, reference=None, prompts=None, task="arithmetic", num=2)


def test_an_average_starts_at_0_changes_every_step_and_is_told_once():
    train("run", **RULES["ema"])
    assert [step for step, value in by_step("run", "kl").items() if value == 0] == [1]
    assert len({facts("run", step)["reference_digest"] for step in range(1, 7)}) == 6
    assert [facts("run", step)["reference_step"] for step in range(1, 7)] == [0, 1, 2, 3, 4, 5]
    assert list(by_step("run", "kl_to_start")) == [2]
    assert [entry["step"] for entry in told("run")] == [1]


def test_a_reference_that_stands_still_leaves_what_it_always_left():
    train("run", max_steps=2)
    saved = Path("run/checkpoints/step=000002")
    state = read_json(saved / "state.json")
    assert state["learner"] == {"num_updates": 2}
    assert "rewards" not in state
    assert sorted(path.name for path in saved.iterdir()) == [
        "manifest.json",
        "model",
        "optimizer.safetensors",
        "state.json",
    ]
    assert by_step("run", "kl_to_start") == {}
    assert facts("run", 2)["reference_step"] == 0


def test_another_checkpoint_is_not_0_at_the_start_and_is_after_a_reset(tmp_path):
    train("other", max_steps=2)
    path = tmp_path / "other/checkpoints/step=000002/model"
    train("run", **{"reference.path": str(path), "reference.reset_every": 2})
    found = by_step("run", "kl")
    assert found[1] > 0
    assert found[2] > 0
    assert found[3] == 0


def test_an_adapter_that_was_trained_moves_its_own_copy_or_is_tied_to_a_named_base(tmp_path):
    base = write_base(tmp_path / "base")
    adapter = write_adapter(tmp_path / "sft", base)
    train("own", model=adapter, **{"reference.reset_every": 2})
    assert [step for step, value in by_step("own", "kl").items() if value == 0] == [1, 3, 5]
    assert read_run_facts(Path("own"))["reference"]["kind"] == "adapter_frozen"
    train("named", model=adapter, **{"reference.path": str(base), "max_steps": 1})
    assert by_step("named", "kl")[1] > 0
    with pytest.raises(PolicyError, match="a separate model, but the policy trains an adapter"):
        train("no", model=adapter, **{"reference.path": str(base), "reference.ema": 0.9})


def test_a_reference_that_was_tampered_with_is_not_resumed_on():
    settings = {**RULES["ema"], "max_steps": 2}
    train("run", **settings)
    saved = Path("run/checkpoints/step=000002")
    state = read_json(saved / "state.json")
    state["learner"]["reference"]["digest"] = "0" * 64
    found = checkpoint.Checkpoint(folder=saved, step=2, state=state)
    run, _ = assembled("again", settings)
    with pytest.raises(CheckpointError, match="was saved with the digest 0000"):
        run.restore(found)


def assembled(folder, settings):
    keys = {**SMALL, "output.dir": folder, "data.path": FROM_PYTHON, **settings}
    recipe = from_keywords(model="tiny", **keys).recipe
    Path(folder).mkdir(exist_ok=True)
    source = load_task_data(recipe, PythonInputs(rows=ROWS, reward_functions=[flat]))
    return assemble_run(recipe, Path(folder), source, Console(quiet=True)), recipe


def until(recipe, max_steps):
    return recipe.model_copy(
        update={"loop": recipe.loop.model_copy(update={"max_steps": max_steps})}
    )


@pytest.mark.parametrize("rule", RULES)
def test_going_back_in_the_middle_of_a_run_brings_back_its_reference(rule):
    run, recipe = assembled("run", RULES[rule])
    with run:
        run.recipe = until(recipe, 3)
        state = run_loop(run, LoopState(kl=KLCoefState(coef=recipe.kl.coef)))
        before = run.learner.reference.identity()
        run.recipe = until(recipe, 6)
        run_loop(run, state)
        after = run.learner.reference.identity()
        saved = checkpoint.read_checkpoint(Path("run/checkpoints/step=000003"), 3)
        again = run.restore(saved)
        assert again == state
        assert run.learner.reference.identity() == before
        run_loop(run, again)
        assert run.learner.reference.identity() == after
    lines = [entry for entry in metrics(Path("run")) if entry["step"] > 3]
    assert lines[:3] == lines[3:]


@pytest.mark.parametrize(
    ("rewards", "window", "expected"),
    [
        ([1.0, 1.0], 1, True),  # not above
        ([1.0, 1.5], 1, False),
        ([1.0, 0.5], 1, True),
        ([1.0], 1, False),  # nothing to compare with
        ([], 3, False),
        ([9.0, 0.0, 1.0, 1.0, 1.0], 2, False),  # only the last four count
        ([9.0, 0.0, 2.0, 1.0, 1.0], 2, True),
        ([None, 1.0, None, 0.5], 2, True),
        ([None, None, 1.0, 1.0], 2, False),
        ([1.0, 1.0, None, None], 2, False),
    ],
)
def test_a_plateau_by_examples(rewards, window, expected):
    assert has_plateaued(rewards, window) is expected


def test_a_plateau_is_looked_for_only_where_a_reset_may_be():
    rule = ReferenceSection(reset_every=2, on_plateau=True)
    even = (1.0,) * 4
    assert [fraction_to_keep(rule, step, even, committed=True) for step in (4, 5, 6)] == [
        0,
        None,
        0,
    ]
    assert fraction_to_keep(rule, 4, (0.0, 0.0, 1.0, 1.0), committed=True) is None
    assert fraction_to_keep(rule, 2, (1.0, 1.0), committed=True) is None
    still = ReferenceSection()
    assert fraction_to_keep(still, 2, even, committed=True) is None
    average = ReferenceSection(ema=0.9)
    assert fraction_to_keep(average, 1, (), committed=True) == 0.9
    assert fraction_to_keep(average, 1, (), committed=False) is None
