"""vLLM's real engine draws from the policy's weights, also after they have changed."""

import os

import numpy as np
import pytest
from vllm_cases import (
    GAP,
    HOT,
    gap_of,
    loaded,
    moved,
    prompts,
    sampler_of,
    section,
    start,
    tiny,
)

from klinic.checks import sampler_sync
from klinic.errors import EngineLostError, SamplerError
from klinic.faults.vllm_traps import VLLM_TRAPS
from klinic.model.loading import load_policy
from klinic.model.token_filters import TokenFilters
from klinic.model.weights import fingerprint
from klinic.sampler.token_sampling import SamplingParams
from klinic.sampler.vllm.engine import GenerationRequest, SubprocessEngine
from open_ports import listening

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # vLLM has many of its own
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture(scope="module")
def engine(model):
    engine = SubprocessEngine(start(model))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def raw_lora_engine(tmp_path_factory):
    """An engine with adapters that reports raw log-probs: at temperature 1 both are the same."""
    folder = tiny(tmp_path_factory.mktemp("lora") / "model")
    with VLLM_TRAPS["raw log-probs"].inject():
        engine = SubprocessEngine(start(folder, rank=4))
    yield engine, folder
    engine.close()


@pytest.mark.parametrize("temperature", [1.0, HOT])
def test_the_engine_says_what_the_policy_says_after_every_update(model, engine, temperature):
    policy = load_policy(section(model), temperature=temperature, seed=0)
    sampler = sampler_of(policy, engine, temperature=temperature)
    for version in range(3):
        told = loaded(sampler, policy, version)
        assert told.fingerprint == fingerprint(policy.lm)
        assert max(told.sync_gaps["repeated"], told.sync_gaps["fresh"]) < GAP
        assert sampler_sync.diagnose_sync(told.sync_gaps, "fp32") is None
        groups = list(sampler.sample(prompts(), step=version))
        assert gap_of(policy, groups) < GAP
        assert {s.weight_version for g in groups for r in g for s in r.segments} == {version}
        moved(policy)


def test_the_engine_keeps_the_tokens_that_the_learner_keeps(model, engine):
    """All filters at once: their order decides which tokens remain."""
    policy = load_policy(section(model), temperature=1.0, seed=0)
    moved(policy, by=0.05)
    filters = {"top_k": 30, "top_p": 0.9, "min_p": 0.1}
    sampler = sampler_of(policy, engine, **filters)
    loaded(sampler, policy, 0)
    groups = list(sampler.sample(prompts(), step=0))
    assert gap_of(policy, groups, TokenFilters(**filters)) < GAP
    assert gap_of(policy, groups) > 0.05


def test_a_completion_is_a_function_of_its_seed(model, engine):
    policy = load_policy(section(model), temperature=1.0, seed=0)
    sampler = sampler_of(policy, engine)
    loaded(sampler, policy, 0)

    def drawn(step):
        groups = list(sampler.sample(prompts(), step=step))
        return [tuple(r.token_ids.tolist()) for group in groups for r in group]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert len(set(drawn(1))) > 3


def test_a_request_without_a_seed_is_sampled_with_the_seed_of_the_workers(model, engine):
    """One request: with several, the order of their arrival decides who gets which number."""
    policy = load_policy(section(model), temperature=1.0, seed=0)
    sampler = sampler_of(policy, engine)
    loaded(sampler, policy, 0)
    request = GenerationRequest(
        token_ids=[5, 6, 7], seed=None, max_tokens=12, params=SamplingParams(), eos_ids=()
    )

    def sampled(seed):
        engine.seed_workers(seed)
        return engine.generate([request], None)[0].token_ids.tolist()

    first = sampled(2**62 + 1)
    assert sampled(2**62 + 2) != first
    assert sampled(2**62 + 1) == first


def test_what_the_engine_was_sent_and_had_in_its_cache_is_recorded(model, engine):
    policy = load_policy(section(model), temperature=1.0, seed=0)
    sampler = sampler_of(policy, engine)
    loaded(sampler, policy, 0)
    first, again = (list(sampler.sample(prompts(1), step=step)) for step in (1, 2))
    assert np.array_equal(first[0][0].sent_prompt_ids, prompts(1)[0].token_ids)
    assert again[0][0].cached_tokens == 64  # two blocks of 32


def test_the_policy_goes_on_behind_what_was_said(model, engine):
    policy = load_policy(section(model), temperature=1.0, seed=0)
    sampler = sampler_of(policy, engine)
    loaded(sampler, policy, 0)
    ((one, _),) = sampler.sample(prompts(1), step=1)
    short = [one.__class__(prompt=one.prompt, sample=0, segments=(), finish_reason="stop", text="")]
    (longer,) = sampler.extend(short, step=1)
    assert np.array_equal(longer.token_ids, one.token_ids)
    assert gap_of(policy, [[longer]]) < GAP


@pytest.mark.parametrize("name", ["head not packed", "prefix cache kept"])
def test_traps_of_a_sync_are_named_before_anything_is_sampled(model, engine, name):
    policy = load_policy(section(model), temperature=1.0, seed=0)
    loaded(sampler_of(policy, engine), policy, 0)
    with VLLM_TRAPS[name].inject():
        sampler = sampler_of(policy, engine)
        assert sampler_sync.diagnose_sync(loaded(sampler, policy, 0).sync_gaps, "fp32") is None
        moved(policy)
        told = loaded(sampler, policy, 1)
    assert told.fingerprint == fingerprint(policy.lm)  # the engine says that all arrived
    assert sampler_sync.diagnose_sync(told.sync_gaps, "fp32").cause == VLLM_TRAPS[name].cause
    well = loaded(sampler_of(policy, engine), policy, 2)
    assert sampler_sync.diagnose_sync(well.sync_gaps, "fp32") is None


@pytest.mark.slow  # a second engine
def test_adapters_arrive_by_name_and_version(raw_lora_engine):
    engine, folder = raw_lora_engine
    policy = load_policy(section(folder, rank=4), temperature=1.0, seed=0)
    sampler = sampler_of(policy, engine)
    for version in range(3):
        told = loaded(sampler, policy, version)
        assert told.fingerprint == fingerprint(policy.lm)
        assert max(told.sync_gaps["repeated"], told.sync_gaps["fresh"]) < GAP
        assert (told.sync_gaps["adapter_off"] < GAP) == (version == 0)
        assert gap_of(policy, list(sampler.sample(prompts(), step=version))) < GAP
        moved(policy, by=0.1)


@pytest.mark.slow  # a second engine
def test_an_adapter_that_is_not_delivered_is_named(raw_lora_engine):
    engine, folder = raw_lora_engine
    policy = load_policy(section(folder, rank=4), temperature=1.0, seed=0)
    moved(policy, by=0.1)
    with VLLM_TRAPS["adapter not delivered"].inject():
        told = loaded(sampler_of(policy, engine), policy, 1)
    found = sampler_sync.diagnose_sync(told.sync_gaps, "fp32")
    assert found.cause == "stale-sampler"
    assert "without its adapter" in found.summary


@pytest.mark.slow  # a second engine
def test_raw_log_probs_are_named_where_they_matter(raw_lora_engine):
    engine, folder = raw_lora_engine
    for temperature, cause in ((1.0, None), (HOT, "temperature-on-one-side")):
        policy = load_policy(section(folder, rank=4), temperature=temperature, seed=0)
        told = loaded(sampler_of(policy, engine, temperature=temperature), policy, 0)
        found = sampler_sync.diagnose_sync(told.sync_gaps, "fp32")
        assert (found and found.cause) == cause


def test_nobody_listens_on_an_address_that_others_can_reach(engine):
    found = listening(os.getpid())
    assert found, "the engine's processes talk over sockets"
    assert all(address.is_loopback for address in found)


def test_code_that_comes_with_a_model_does_not_run(tmp_path):
    folder = tiny(tmp_path / "model")
    canary = tmp_path / "ran"
    code = f"from pathlib import Path\nPath({str(canary)!r}).write_text('ran')\n"
    for name in ("configuration_evil.py", "modeling_evil.py"):
        (folder / name).write_text(code + "class EvilConfig: ...\nclass Evil: ...\n")
    config = (
        (folder / "config.json")
        .read_text()
        .replace('"qwen3"', '"evil"')
        .replace(
            "{",
            '{"auto_map": {"AutoConfig": "configuration_evil.EvilConfig", '
            '"AutoModelForCausalLM": "modeling_evil.Evil"},',
            1,
        )
    )
    (folder / "config.json").write_text(config)
    with pytest.raises(SamplerError, match="could not start"):
        SubprocessEngine(start(folder))
    assert not canary.exists()


def test_an_engine_that_has_died_is_told_of(model, engine):
    """The last test of this file: nobody asks this engine again."""
    policy = load_policy(section(model), temperature=1.0, seed=0)
    sampler = sampler_of(policy, engine)
    loaded(sampler, policy, 0)
    for process in engine._processes:
        process.kill()
    with pytest.raises(EngineLostError, match="the vLLM process exited"):
        list(sampler.sample(prompts(), step=1))
