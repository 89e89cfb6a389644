"""Each process of a cluster run has a GPU of its own, the first process included."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

pytest.importorskip("ray")

from klinic.cluster.placement import (
    LEARNER,
    REWARDS,
    SAMPLER,
    describe_placements,
    worker_placements,
)
from klinic.errors import ConfigError
from klinic.recipe.loading import from_keywords
from klinic.recipe.recipe import Recipe
from klinic.training import build, train
from klinic.training.ray_run import RayWorkers
from klinic.training.source import PythonInputs, load_task_data

HERE = Path(__file__).parent


def recipe_of(*, shards, samplers):
    return Recipe.model_validate(
        {
            "model": {"name": "tiny"},
            "data": {"task": "arithmetic"},
            "cluster": {"samplers": samplers, "reward_workers": 2},
            "learner": {"shards": shards},
        }
    )


def test_the_driver_counts_as_one_gpu_and_reward_workers_as_none():
    recipe = recipe_of(shards=7, samplers=1)
    placements = worker_placements(recipe, gpus=True)
    assert sum(placement.gpus for placement in placements) == 8
    assert [placement.bundle for placement in placements] == list(range(10))
    assert describe_placements(recipe, placements)[1:] == [
        "  the driver, 1 GPU",
        "  1 x sampler, 1 CPU and 1 GPU each",
        "  6 x learner, 1 CPU and 1 GPU each",
        "  2 x rewards, 1 CPU each",
    ]


def test_without_gpus_the_driver_reserves_nothing():
    placements = worker_placements(recipe_of(shards=2, samplers=1), gpus=False)
    assert [placement.kind for placement in placements] == [SAMPLER, LEARNER, REWARDS, REWARDS]
    assert all(placement.resource_bundle == {"CPU": 1.0} for placement in placements)


def test_more_processes_than_gpus_are_refused_before_ray_starts(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    with pytest.raises(ConfigError, match="cluster needs 9 GPUs, one for each of 8 learners"):
        RayWorkers(recipe_of(shards=8, samplers=1), tmp_path)


def test_a_sampler_has_the_gpus_of_its_engine():
    values = recipe_of(shards=2, samplers=2).model_dump()
    values["sampler"] |= {"type": "vllm", "tensor_parallel_size": 4}
    placements = worker_placements(Recipe.model_validate(values), gpus=True)
    assert [placement.gpus for placement in placements] == [1, 4, 4, 1, 0, 0]


@pytest.mark.parametrize(("device", "moves"), [("auto", True), ("cpu", False)])
def test_a_single_learner_of_a_cluster_is_on_the_gpu_that_ray_reserved(
    monkeypatch, tmp_path, device, moves
):
    moved_to = []

    class OneWorker(RayWorkers):
        learner_device = torch.device("cuda", 3)

        def __init__(self):
            pass

        def close(self):
            pass

        def make_sampler(self, recipe, policy, source, start):
            return build.make_sampler(recipe, policy, source)

    monkeypatch.setattr(train, "_start_ray_workers", lambda *_: OneWorker())
    monkeypatch.setattr(train, "move_model", lambda lm, device: moved_to.append(device))
    settings = {"model.device": device, "cluster.samplers": 1, "output.trackers": []}
    recipe = from_keywords(model="tiny", task="arithmetic", **settings).recipe
    task_data = load_task_data(recipe, PythonInputs())
    train.assemble_run(recipe, tmp_path, task_data, Console(quiet=True))
    assert moved_to == ([OneWorker.learner_device] if moves else [])


def gpus_of(*shapes):
    done = subprocess.run(
        [sys.executable, str(HERE / "gpu_workers.py"), *shapes],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def all_ids(found):
    return [gpu for gpus in (found["driver"], *found["samplers"], *found["ranks"]) for gpu in gpus]


def assert_disjoint(shape):
    found = gpus_of(shape)[shape]
    shards, samplers = shape.split("+")[:2]
    samplers, _, engine_size = samplers.partition("x")
    assert (len(found["ranks"]), len(found["samplers"])) == (int(shards) - 1, int(samplers))
    assert {len(gpus) for gpus in found["samplers"]} == {int(engine_size or 1)}
    ids = all_ids(found)
    assert len(ids) == len(set(ids)) == int(shards) + int(samplers) * int(engine_size or 1), found


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_every_process_has_one_of_the_visible_gpus_to_itself():
    assert_disjoint("2+1+5,3,6")


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", ["7+1", "1+1", "6+2", "4+4", "4+2x2"])
def test_every_process_has_a_gpu_of_its_own(shape):
    assert_disjoint(shape)
