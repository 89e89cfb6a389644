"""Whole runs that sample with vLLM: well ones, and ones in which it serves something else."""

import json

import pytest
from rich.console import Console

from klinic.errors import RunStoppedError
from klinic.faults.vllm_traps import VLLM_TRAPS
from klinic.recipe.loading import from_keywords
from klinic.training.source import PythonInputs
from klinic.training.train import train

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # vLLM has many of its own
]
SMALL = {
    "model": "tiny",
    "task": "arithmetic",
    "kl_coef": 0.02,
    "warm_start.steps": 60,  # a policy that never ends has a cause of its own
    "warm_start.batch_size": 32,
    "rewards": ["graduated"],  # nor do equal rewards teach anything
    "max_steps": 4,
    "prompts_per_step": 4,
    "group_size": 4,
    "max_new_tokens": 6,
    "learning_rate": 1e-3,
    "threads": 1,
    "sampler.type": "vllm",
    "loop.eval_prompts": 4,
    "output.trackers": [],
    "output.doctor": "stop",
}
FOR = {"adapter": {"lora_rank": 4}, "temperature": {"temperature": 1.3}, "": {}}


def run(folder, **settings):
    recipe = from_keywords(**{**SMALL, "output.dir": str(folder), **settings}).recipe
    return train(recipe, name="run", inputs=PythonInputs(), console=Console(quiet=True))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def _settings_as_they_were(warm):
    pass


@pytest.mark.parametrize("needs", FOR)
def test_a_well_run_is_not_stopped(tmp_path, needs):
    assert run(tmp_path / "run", **FOR[needs]).step == 4
    probes = lines(tmp_path / "run" / "probes.jsonl")
    gaps = [p["repeated"] + p["fresh"] for p in probes if p["probe"] == "sampler_sync"]
    assert len(gaps) == 4
    assert max(gaps) < 2e-4
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["sampler"]["kind"] == "vllm"
    assert facts["logprob_mode"] == "processed"


@pytest.mark.parametrize("name", VLLM_TRAPS)
def test_a_trap_is_named_before_the_step_it_is_in_is_learnt_from(tmp_path, name):
    trap = VLLM_TRAPS[name]
    with trap.inject(), pytest.raises(RunStoppedError, match=trap.cause):
        run(tmp_path / "run", **FOR[trap.needs])
    (event,) = lines(tmp_path / "run" / "events.jsonl")
    assert event["cause"] == trap.cause
    # the first sync after which something can differ: before any update, only log-probs can
    assert event["step"] == (1 if trap.needs == "temperature" else 2)
    steps = [entry["step"] for entry in lines(tmp_path / "run" / "metrics.jsonl") if "kl" in entry]
    assert steps == list(range(1, event["step"]))
