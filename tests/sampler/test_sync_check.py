"""The probe after a sync tells the mistakes apart, and is silent where there is none."""

import copy

import numpy as np
import pytest
import torch
from sleeping_engine import reported_logp

from klinic.checks import sampler_sync
from klinic.model.layout import pad_rows
from klinic.model.policy_source import PolicySource
from klinic.model.scorer import TokenScorer
from klinic.sampler.rollouts import GenerationOutput
from klinic.sampler.vllm.sync_check import PROMPT_TOKENS, SyncProbe
from tiny_policies import small_model, small_policy

WINDOW = 400


@pytest.fixture
def policy():
    return small_policy(model=small_model(n_positions=WINDOW), temperature=1.3)


def engine_of(scorer, *, forgets=True):
    """Return an engine that tells of its likeliest outcomes; with a cache, by first weights."""
    first: dict[tuple[int, ...], list[dict[int, float]]] = {}

    def generate(asked):
        told = []
        for one in asked:
            ids = np.random.default_rng(one.seed).integers(3, 50, one.max_tokens).tolist()
            layout = pad_rows(
                [np.array(one.token_ids)], [np.array(ids)], pad_id=0, device=scorer.device
            )
            with torch.no_grad():
                logp = scorer.log_softmax(scorer.logits_of(scorer.hidden(layout)))
            top = logp.topk(one.num_top)
            rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            outcomes = [dict(zip(*row, strict=True)) for row in rows]
            if not forgets:
                outcomes = first.setdefault(tuple(one.token_ids), outcomes)
            told.append(
                GenerationOutput(
                    token_ids=np.array(ids),
                    logp=np.zeros(len(ids)),
                    finish_reason="length",
                    top=reported_logp(outcomes),
                    context=np.array(one.token_ids),
                    cached_tokens=0,
                )
            )
        return told

    return generate


def judged(probe, generate):
    asked = probe.make_requests()
    return probe.measure_gaps(asked, generate(asked), PolicySource(probe._policy))


def moved(policy, by=0.02):
    with torch.no_grad():
        for p in policy.lm.parameters():
            if p.requires_grad:
                p.add_(by * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))


def named(answer, dtype="fp32"):
    found = sampler_sync.diagnose_sync(answer, dtype)
    return None if found is None else found.cause


def test_an_engine_with_the_same_weights_is_well(policy):
    probe = SyncProbe(policy)
    for _ in range(2):
        answer = judged(probe, engine_of(policy.scorer))
        assert answer["repeated"] < 1e-5
        assert named(answer) is None
        moved(policy)


def test_old_weights_are_seen_on_any_prompt(policy):
    old = copy.deepcopy(policy.scorer)
    moved(policy)
    answer = judged(SyncProbe(policy), engine_of(old))
    assert named(answer) == "stale-sampler"


def test_an_old_prefix_cache_is_seen_on_the_prompt_that_is_repeated(policy):
    probe, stale = SyncProbe(policy), engine_of(policy.scorer, forgets=False)

    def cached(asked):  # what was asked before is answered as before, what is new is not
        return [stale([one])[0] for one in asked]

    same_seed = judged(probe, cached)
    assert named(same_seed) is None
    moved(policy)
    asked = probe.make_requests()
    told = cached(asked)
    # the tokens behind the repeated prompt are drawn anew; their log-probs are the old ones
    answer = probe.measure_gaps(asked, told, PolicySource(policy))
    assert answer["fresh"] < 1e-5 < answer["repeated"]
    assert named(answer) == "stale-prefix-cache"


def test_raw_log_probs_are_the_policy_s_at_temperature_1(policy):
    raw = TokenScorer(policy.lm, temperature=1.0)
    answer = judged(SyncProbe(policy), engine_of(raw))
    assert answer["raw"] < 1e-5
    assert named(answer) == "temperature-on-one-side"


def test_an_adapter_that_did_not_arrive_is_the_policy_without_it():
    policy = small_policy(model=small_model(n_positions=WINDOW), lora_rank=2)
    moved(policy, by=0.3)

    def without(asked):
        with policy.lm.disable_adapter():
            return engine_of(policy.scorer)(asked)

    answer = judged(SyncProbe(policy), without)
    assert named(answer) == "stale-sampler"
    assert "without its adapter" in sampler_sync.diagnose_sync(answer, "fp32").summary


def test_prompts_are_long_and_hold_no_end(policy):
    first, second = SyncProbe(policy).make_requests()
    assert len(first.token_ids) == len(second.token_ids) == PROMPT_TOKENS
    assert first.token_ids != second.token_ids
    assert not set(policy.eos_ids) & {*first.token_ids, *second.token_ids}
    again = SyncProbe(policy).make_requests()[0]
    assert again.token_ids == first.token_ids


@pytest.mark.parametrize(("gap", "dtype", "cause"), [(0.01, "bf16", None), (0.01, "fp32", "x")])
def test_what_rounding_of_bf16_does_is_no_cause(gap, dtype, cause):
    found = named({"repeated": gap, "fresh": gap}, dtype)
    assert (found is None) == (cause is None)
