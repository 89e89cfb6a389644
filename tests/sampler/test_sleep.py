"""An engine on the learner's GPU sleeps while the learner trains, and wakes with its weights."""

import pytest
import torch
from sleeping_engine import SleepingEngine
from vllm_cases import GAP, gap_of, loaded, moved, prompts, sampler_of

from klinic.checks import sampler_sync
from klinic.errors import ConfigError
from klinic.model.loading import load_policy
from klinic.recipe.loading import from_keywords
from klinic.recipe.sections import ModelSection
from klinic.sampler.protocol import release_sampler_memory
from klinic.sampler.vllm.engine import EngineConfig
from klinic.training import build_engine

SYNC = ["start", "finish"]
PROBE_AND_SAMPLE = ["reset", "generate 2 seeds", "generate 6 seeds"]
AWAKE = ["wake weights", *SYNC, "wake kv_cache", *PROBE_AND_SAMPLE, "sleep"]


def tiny_policy(**settings):
    return load_policy(ModelSection(name="tiny", **settings), temperature=1.0, seed=0)


def step_with(sampler, policy, version):
    """Sync, sample and sleep; return what the probe found, and the gap of the completions."""
    told = loaded(sampler, policy, version)
    groups = list(sampler.sample(prompts(), step=version))
    release_sampler_memory(sampler)
    return told.sync_gaps, gap_of(policy, groups)


@pytest.mark.parametrize(
    ("level", "step"), [(0, [*SYNC, *PROBE_AND_SAMPLE]), (1, AWAKE), (2, AWAKE)]
)
def test_weights_are_replaced_between_the_two_halves_of_waking(level, step):
    policy = tiny_policy()
    engine = SleepingEngine(policy, level=level)
    sampler = sampler_of(policy, engine)
    for version in range(2):
        gaps, gap = step_with(sampler, policy, version)
        assert max(gaps["repeated"], gaps["fresh"], gap) < GAP
        assert sampler_sync.diagnose_sync(gaps, "fp32") is None
        moved(policy)
    assert engine.calls == [*(["sleep"] if level else []), *step, *step]
    sampler.close()


def test_an_adapter_arrives_between_the_two_halves_of_waking():
    policy = tiny_policy(lora_rank=4)
    engine = SleepingEngine(policy, level=1)
    sampler = sampler_of(policy, engine)
    moved(policy)
    gaps, gap = step_with(sampler, policy, 1)
    assert max(gaps["fresh"], gap) < GAP
    adapter = ["wake weights", "adapter", "wake kv_cache", *PROBE_AND_SAMPLE, "sleep"]
    assert engine.calls == ["sleep", *adapter]
    sampler.close()


def test_an_engine_that_wakes_with_old_weights_is_a_stale_sampler():
    policy = tiny_policy()
    sampler = sampler_of(policy, SleepingEngine(policy, level=1, restores_late=True))
    step_with(sampler, policy, 0)
    moved(policy)
    gaps, _ = step_with(sampler, policy, 1)
    assert sampler_sync.diagnose_sync(gaps, "fp32").cause == "stale-sampler"
    sampler.close()


DAMAGES = {
    "model.norm.weight did not arrive": lambda name, p: None if name == "model.norm.weight" else p,
    "model.layers.1.mlp.up_proj.weight arrived with 0.5 times its norm": lambda name, p: (
        0.5 * p if name == "model.layers.1.mlp.up_proj.weight" else p
    ),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_tensor_that_is_damaged_on_its_way_is_named(message):
    policy = tiny_policy()
    engine = SleepingEngine(policy, level=0, damage=DAMAGES[message])
    sampler = sampler_of(policy, engine)
    told = loaded(sampler, policy, 0)
    found = sampler_sync.diagnose_sync(told.probe_result, "fp32")
    assert (found.cause, found.summary) == ("corrupted-sync", f"in a weight sync, {message}")
    sampler.close()


def test_two_tensors_that_are_swapped_on_their_way_are_named():
    policy = tiny_policy()
    names = [f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 1)]
    swapped = dict(zip(names, reversed(names), strict=True))
    engine = SleepingEngine(policy, level=0, rename=lambda name: swapped.get(name, name))
    sampler = sampler_of(policy, engine)
    found = sampler_sync.diagnose_sync(loaded(sampler, policy, 0).probe_result, "fp32")
    assert found.cause == "corrupted-sync"
    both = f"{names[0]} arrived as {names[1]}, {names[1]} arrived as {names[0]}"
    assert found.summary.endswith(both)
    sampler.close()


def test_a_sync_of_which_nothing_arrives_is_a_stale_sampler():
    policy = tiny_policy()
    engine = SleepingEngine(policy, level=0, damage=lambda name, p: None)
    sampler = sampler_of(policy, engine)
    found = sampler_sync.diagnose_sync(loaded(sampler, policy, 0).probe_result, "fp32")
    assert found.cause == "stale-sampler"
    sampler.close()


def test_without_seeds_of_completions_each_call_has_a_seed_of_its_step():
    policy = tiny_policy()
    engine = SleepingEngine(policy, level=0, seeds_requests=False)
    sampler = sampler_of(policy, engine)
    loaded(sampler, policy, 0)
    for step in (1, 2, 1):
        engine.calls.clear()
        list(sampler.sample(prompts(), step=step))
        seeds, generated = engine.calls
        assert generated == "generate 0 seeds"
        if step == 1:
            first = seeds
        assert (seeds == first) == (step == 1)
    sampler.close()


def test_the_learner_returns_its_freed_memory_before_the_engine_wakes(monkeypatch):
    policy = tiny_policy()
    engine = SleepingEngine(policy, level=2)
    sampler = sampler_of(policy, engine)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: engine.calls.append("empty cache"))
    loaded(sampler, policy, 0)
    assert engine.calls[:3] == ["sleep", "empty cache", "wake weights"]
    sampler.close()


SMALL = {"model": "tiny", "task": "arithmetic", "sampler.type": "vllm"}
ADAPTER = {"lora_rank": 4}
TWO_SHARDS = {"learner.shards": 2}


@pytest.fixture
def with_gpus(monkeypatch):
    def machine(num):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: num > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num)

    return machine


@pytest.mark.parametrize(
    ("num_gpus", "settings", "level", "memory"),
    [
        (0, {}, 0, None),
        (1, {}, 2, 0.4),
        (1, ADAPTER, 1, 0.4),
        (1, {"sampler.sleep_level": 0}, 0, 0.4),
        (1, {"sampler.sleep_level": 1}, 1, 0.4),
        (1, {"model.device": "cpu"}, 0, None),
        (2, {**TWO_SHARDS, "model.device": "cpu"}, 2, 0.4),
        (2, {"cluster.samplers": 1}, 0, None),
        (1, {"sampler.server": "http://127.0.0.1:8000"}, 0, None),
        (1, {"sampler.gpu_memory_utilization": 0.3}, 2, 0.3),
    ],
)
def test_an_engine_sleeps_where_it_shares_the_learners_gpu(
    with_gpus, num_gpus, settings, level, memory
):
    policy = tiny_policy(lora_rank=settings.get("lora_rank"))
    recipe = from_keywords(**{**SMALL, **settings}).recipe
    with_gpus(num_gpus)
    assert build_engine.engine_sleep_level(recipe, policy) == level
    assert build_engine._engine_memory(recipe) == memory


def engine_config(**settings):
    return EngineConfig(
        model="m",
        dtype="float32",
        window=None,
        remote=False,
        lora_rank=None,
        threads=1,
        log=None,
        **settings,
    )


def test_a_gpu_has_graphs_sleep_and_tensor_parallelism_and_a_cpu_none_of_them(with_gpus):
    start = engine_config(sleep_level=2, tensor_parallel_size=4)
    with_gpus(0)
    on_cpu = start.engine_arguments()
    assert on_cpu["enforce_eager"]
    assert not {"enable_sleep_mode", "tensor_parallel_size"} & on_cpu.keys()
    assert start.environment_variables()["TORCH_COMPILE_DISABLE"] == "1"
    with_gpus(4)
    on_gpu = start.engine_arguments()
    assert (on_gpu["enforce_eager"], on_gpu["enable_sleep_mode"]) == (False, True)
    assert on_gpu["tensor_parallel_size"] == 4
    assert "TORCH_COMPILE_DISABLE" not in start.environment_variables()
    assert "enable_sleep_mode" not in engine_config().engine_arguments()


def test_completions_have_seeds_on_a_cpu_and_where_vllm_is_batch_invariant(with_gpus, monkeypatch):
    monkeypatch.delenv(build_engine.BATCH_INVARIANT, raising=False)
    with_gpus(0)
    assert build_engine.seeds_requests()
    with_gpus(1)
    assert not build_engine.seeds_requests()
    monkeypatch.setenv(build_engine.BATCH_INVARIANT, "1")
    assert build_engine.seeds_requests()


@pytest.mark.parametrize(
    ("num_gpus", "settings", "message"),
    [
        (2, {"sampler.tensor_parallel_size": 4}, "an engine finds 2 GPUs here"),
        (0, {"sampler.tensor_parallel_size": 2}, "an engine finds 0 GPUs here"),
        (0, {"sampler.sleep_level": 1}, "there is no GPU here"),
    ],
)
def test_settings_for_gpus_that_are_not_there_are_refused(with_gpus, num_gpus, settings, message):
    recipe = from_keywords(**{**SMALL, **settings}).recipe
    with_gpus(num_gpus)
    with pytest.raises(ConfigError, match=message):
        build_engine.refuse_missing_gpus(recipe)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler.type": "transformers", "sampler.sleep_level": 1}, "which has no engine"),
        ({"sampler.type": "transformers", "tensor_parallel_size": 2}, "which has no engine"),
        ({"sampler.sleep_level": 2, **ADAPTER}, "only the adapter is sent"),
        ({"sampler.sleep_level": 1, "cluster.samplers": 1}, "GPUs of their own"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        from_keywords(**{**SMALL, **settings})


@pytest.mark.parametrize("name", ["vllm_enable_sleep_mode", "free_cache_engine"])
def test_the_switches_of_trl_and_verl_set_the_level(name):
    levels = [
        from_keywords(**{**SMALL, name: flag}).recipe.sampler.sleep_level for flag in (True, False)
    ]
    assert levels == ["auto", 0]
