"""Whole runs beside an engine that sleeps: trained on while it sleeps, named if it wakes stale."""

import json
import sys
from itertools import groupby
from pathlib import Path

import pytest
from rich.console import Console

from klinic.errors import RunStoppedError
from klinic.learner.local import LocalLearner
from klinic.recipe.loading import from_keywords
from klinic.training import build
from klinic.training.source import PythonInputs
from klinic.training.train import train

sys.path.append(str(Path(__file__).parents[1] / "sampler"))
from sleeping_engine import SleepingEngine

SMALL = {
    "model": "tiny",
    "task": "arithmetic",
    "kl_coef": 0.02,
    "warm_start.steps": 60,  # a policy that never ends has a cause of its own
    "warm_start.batch_size": 32,
    "rewards": ["graduated"],
    "max_steps": 2,
    "prompts_per_step": 3,
    "group_size": 2,
    "max_new_tokens": 5,
    "learning_rate": 1e-3,
    "threads": 1,
    "sampler.type": "vllm",
    "loop.extra_rounds": 1,
    "loop.eval_prompts": 4,
    "output.trackers": [],
    "output.doctor": "stop",
}


@pytest.fixture
def engine_of(monkeypatch):
    """Let runs start a sleeping engine of these settings; return the engines."""
    engines = []

    def settings(**options):
        def make_engine(recipe, policy, log):
            engines.append(SleepingEngine(policy, **options))
            return engines[-1]

        monkeypatch.setattr(build, "make_engine", make_engine)
        return engines

    return settings


def run(folder):
    recipe = from_keywords(**{**SMALL, "output.dir": str(folder)}).recipe
    return train(recipe, name="run", inputs=PythonInputs(), console=Console(quiet=True))


@pytest.mark.parametrize("level", [2])
def test_the_engine_sleeps_while_the_learner_trains(tmp_path, engine_of, monkeypatch, warm, level):
    engines = engine_of(level=level)
    plain = LocalLearner.prepare

    def prepare(self, *arguments):
        engines[0].calls.append("prepare")
        return plain(self, *arguments)

    monkeypatch.setattr(LocalLearner, "prepare", prepare)
    assert run(tmp_path / "run").step == 2
    calls = [call for call, _ in groupby(engines[0].calls)]  # a step may have several prepares
    assert calls[0] == "sleep"
    before = [calls[number - 1] for number, call in enumerate(calls) if call == "prepare"]
    assert before == ["sleep", "sleep"]  # after sampling, however many rounds of it
    # for two steps and two evaluations
    assert [calls.count(f"wake {what}") for what in ("weights", "kv_cache")] == [4, 4]
    assert calls.count("sleep") == 5


@pytest.mark.slow  # test_sleep.py names damaged tensors without a run
def test_a_damaged_tensor_is_named_before_anything_is_trained_on_it(tmp_path, engine_of, warm):
    version = []

    def scale_later(name, tensor):
        if name == "model.layers.0.self_attn.q_proj.weight":
            version.append(name)
            if len(version) == 3:  # after the first evaluation and the first step
                return 1.5 * tensor
        return tensor

    engine_of(level=0, damage=scale_later)
    with pytest.raises(RunStoppedError, match="corrupted-sync"):
        run(tmp_path / "run")
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    (event,) = [json.loads(line) for line in events]
    assert (event["cause"], event["step"]) == ("corrupted-sync", 2)
    assert "q_proj.weight arrived with 1.5 times its norm" in event["says"]


def test_an_engine_that_wakes_with_old_weights_is_named_before_its_step(tmp_path, engine_of, warm):
    engine_of(level=1, restores_late=True)
    with pytest.raises(RunStoppedError, match="stale-sampler"):
        run(tmp_path / "run")
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    (event,) = [json.loads(line) for line in events]
    assert (event["cause"], event["step"]) == ("stale-sampler", 2)
