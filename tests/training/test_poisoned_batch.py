"""A batch that would spoil the policy is found and left out, whoever kills the run meanwhile."""

import json

import pytest
from rich.console import Console

from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import read_tokens
from klinic.recipe.loading import load_recipe
from klinic.training.source import PythonInputs
from klinic.training.train import train
from training.killing import RECIPE, GoingBack, differences, run_killed, run_whole
from training.poison import all_numbers

pytestmark = pytest.mark.timeout(600)

REWARDS = """
SPOILT = {spoilt!r}

def scored(prompts, completions, answer, **_):
    values = [0.8 + 0.1 * (len(text) % 2) for text in completions]
    bad = [prompt in SPOILT for prompt in prompts]
    return [{change} if b else v for v, b in zip(values, bad)]
"""
CHANGES = {"scaled": "v * 1e6", "inverted": "1 - v"}
LIMITS = "recovery: {grad_norm_limit: 20, reward_drop: 0.3}\noutput: {doctor: none}\n"


def settings(folder, steps):
    recipe = RECIPE.replace("graduated", f"{folder}/rewards.py:scored")
    return recipe.replace("max_steps: 12", f"max_steps: {steps}") + LIMITS


def write(folder, spoilt=(), change="v", steps=26):
    folder.mkdir()
    (folder / "recipe.yaml").write_text(settings(folder, steps))
    (folder / "rewards.py").write_text(REWARDS.format(spoilt=set(spoilt), change=change))
    return folder


def prompts_of(run, step):
    """Return the prompts of a step as text."""
    record, tokens = store.read_record(run, step), read_tokens(run)
    cuts = zip(record.prompt_offsets[:-1], record.prompt_offsets[1:], strict=True)
    return {"".join(tokens[i] for i in record.prompt_ids[a:b].tolist()) for a, b in cuts}


def trouble(run):
    return [e for e in Journal(run / "events.jsonl").entries() if e["event"] == "trouble"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def clean(tmp_path_factory, cache):
    folder = write(tmp_path_factory.mktemp("clean") / "clean")
    run_whole(folder, cache)
    assert trouble(folder / "run") == []
    return folder / "run"


@pytest.mark.usefixtures("as_before")
@pytest.mark.slow  # docs/how-to/recover.md leaves a poisoned batch out in every run of all tests
@pytest.mark.parametrize("kind", CHANGES)
def test_it_is_left_out_and_the_next_batch_takes_its_place(
    tmp_path, monkeypatch, cache, clean, kind
):
    folder = write(tmp_path / "one", prompts_of(clean, 22), CHANGES[kind])
    run = folder / "run"
    monkeypatch.setenv("KLINIC_CACHE", str(cache))
    recipe = load_recipe(folder / "recipe.yaml", [f"output.dir={run}"]).recipe
    train(recipe, name="one", inputs=PythonInputs(), console=Console(quiet=True))
    again, skip = trouble(run)
    assert (again["act"], skip["act"], skip["step"], skip["places"]) == ("again", "skip", 22, [22])
    assert again["kind"] == {"scaled": "gradient norm", "inverted": "batch reward"}[kind]
    assert all_numbers(run)
    assert prompts_of(run, 21) == prompts_of(clean, 21)
    for step in range(22, 26):
        assert prompts_of(run, step) == prompts_of(clean, step + 1)


@pytest.mark.slow
def test_killed_on_the_way_back_it_comes_to_the_same_weights(tmp_path, cache, clean):
    """Two in a row are rolled back; the run is killed when that is decided and not yet done."""
    spoilt = prompts_of(clean, 14) | prompts_of(clean, 15)
    whole = write(tmp_path / "whole", spoilt, CHANGES["scaled"], steps=17)
    run_whole(whole, cache)
    acts = [(e["step"], e["act"]) for e in trouble(whole / "run")]
    assert acts == [(14, "again"), (14, "skip"), (14, "again"), (14, "roll back")]
    plan = json.loads((whole / "run" / "recovery.json").read_text())
    assert (plan["skipped"], plan["back_to"]) == ([14, 15], None)
    killed = write(tmp_path / "killed", spoilt, CHANGES["scaled"], steps=17)
    run_killed(killed, cache, GoingBack())
    plan = json.loads((killed / "run" / "recovery.json").read_text())
    assert plan["back_to"] == 12
    run_whole(killed, cache, "--resume")
    assert differences(whole / "run", killed / "run") == []
    events = [e["event"] for e in Journal(killed / "run" / "events.jsonl").entries()]
    assert "resumed rollback" in events
