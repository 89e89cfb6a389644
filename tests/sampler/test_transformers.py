"""Completions are the model's own, each token with the log-prob it was drawn at."""

import numpy as np
import pytest
import torch
import transformers

from klinic.errors import ConfigError, DataError
from klinic.evidence.record import EmittedBy
from klinic.evidence.rollout import Prompt, Segment, flatten_rollouts
from klinic.model.layout import pad_rows
from klinic.model.tiny import tiny_tokenizer
from klinic.model.weights import Weights, fingerprint
from klinic.sampler.kv_cache import BLOCK
from klinic.sampler.token_sampling import SamplingParams
from klinic.sampler.transformers import TransformersSampler
from tiny_policies import small_policy

TEXTS = ("1+2=", "copy 12345=", "7", "31-30=")


def prompts(policy, texts=TEXTS):
    encode = policy.tokenizer.encode
    return [
        Prompt(index=i, text=t, token_ids=np.array(encode(t)), columns={})
        for i, t in enumerate(texts)
    ]


def sampler(policy, *, group_size=3, longest=12, **how):
    return TransformersSampler(
        policy, params=SamplingParams(**how), max_new_tokens=longest, group_size=group_size, seed=7
    )


def by_name(groups):
    return {(r.prompt.index, r.sample): r for group in groups for r in group}


def scored(policy, rollout):
    layout = pad_rows(
        [rollout.prompt.token_ids], [rollout.token_ids], pad_id=0, device=torch.device("cpu")
    )
    with torch.no_grad():
        return policy.scorer(layout).logp.numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_sampler_and_the_learner_agree_on_every_log_prob(temperature):
    policy = small_policy(temperature=temperature)
    groups = by_name(sampler(policy, temperature=temperature).sample(prompts(policy), step=1))
    assert len(groups) == 12
    for rollout in groups.values():
        (segment,) = rollout.segments
        np.testing.assert_allclose(segment.logp_sampler, scored(policy, rollout), atol=1e-4)


def test_greedy_tokens_are_those_of_generate():
    policy = small_policy()
    ours = by_name(sampler(policy, group_size=1, temperature=0.0).sample(prompts(policy), step=1))
    for (index, _), rollout in ours.items():
        given = torch.from_numpy(prompts(policy)[index].token_ids)[None]
        theirs = policy.lm.generate(
            given, do_sample=False, max_new_tokens=12, attention_mask=torch.ones_like(given)
        )[0, given.shape[1] :]
        assert rollout.token_ids.tolist() == theirs.tolist()


def test_a_completion_does_not_depend_on_its_company():
    policy = small_policy(double=True)
    together = by_name(sampler(policy).sample(prompts(policy), step=4))
    for prompt in prompts(policy):
        alone = by_name(sampler(policy, group_size=2).sample([prompt], step=4))
        for name, rollout in alone.items():
            assert rollout.token_ids.tolist() == together[name].token_ids.tolist()
    other_step = by_name(sampler(policy).sample(prompts(policy), step=5))
    assert any(
        other_step[name].token_ids.tolist() != together[name].token_ids.tolist()
        for name in together
    )


def test_every_end_token_ends_a_completion_and_is_part_of_it():
    policy = small_policy()
    ends = (policy.eos_ids[0], *range(3, 30))
    many = type(policy)(**{**_fields(policy), "eos_ids": ends})
    finished = by_name(sampler(many, longest=30).sample(prompts(policy), step=1)).values()
    reasons = {r.finish_reason for r in finished}
    assert "stop" in reasons
    for rollout in finished:
        *before, last = rollout.token_ids.tolist()
        assert not set(before) & set(ends)
        assert (last in ends) == (rollout.finish_reason == "stop")
        assert rollout.finish_reason == "stop" or len(rollout.token_ids) == 30
    assert len({int(r.token_ids[-1]) for r in finished} & set(ends)) > 1


def _fields(policy):
    return {name: getattr(policy, name) for name in type(policy).__slots__}


def test_groups_come_as_they_finish():
    policy = small_policy()
    ends = (policy.eos_ids[0], *range(3, 20))
    many = type(policy)(**{**_fields(policy), "eos_ids": ends})
    order = [
        max(len(r.token_ids) for r in group)
        for group in sampler(many, longest=40, group_size=2).sample(prompts(policy), step=2)
    ]
    assert order == sorted(order)
    assert len(set(order)) > 1


def test_a_tool_s_text_is_read_on_and_never_trained_on():
    policy = small_policy()
    engine = sampler(policy, longest=10)
    engine.load(Weights(version=5, fingerprint="", location="process"))
    first = [r for group in engine.sample(prompts(policy), step=3) for r in group]
    cut = [_keeping(rollout, 4) for rollout in first]
    said = np.array(policy.tokenizer.encode(" (tool: 42) "))
    tool = Segment(token_ids=said, emitted_by=EmittedBy.TOOL, logp_sampler=None, weight_version=5)
    second = engine.extend([_with(rollout, tool) for rollout in cut], step=3)
    record = flatten_rollouts(second, step=3)
    assert record.loss_mask.sum() == sum(r.num_policy_tokens for r in second)
    assert np.isnan(record.logp_sampler[~record.loss_mask]).all()
    for rollout in second:
        assert rollout.num_policy_tokens <= 10
        assert [s.emitted_by for s in rollout.segments].count(EmittedBy.TOOL) == 1
        logp = scored(policy, rollout)
        told = np.concatenate(
            [
                np.full(len(s.token_ids), np.nan) if s.logp_sampler is None else s.logp_sampler
                for s in rollout.segments
            ]
        )
        trained = ~np.isnan(told)
        np.testing.assert_allclose(told[trained], logp[trained], atol=1e-4)


def _keeping(rollout, num):
    (segment,) = rollout.segments
    short = Segment(
        token_ids=segment.token_ids[:num],
        emitted_by=EmittedBy.POLICY,
        logp_sampler=segment.logp_sampler[:num],
        weight_version=segment.weight_version,
    )
    return type(rollout)(
        prompt=rollout.prompt,
        sample=rollout.sample,
        segments=(short,),
        finish_reason="length",
        text="",
    )


def _with(rollout, segment):
    return type(rollout)(
        prompt=rollout.prompt,
        sample=rollout.sample,
        segments=(*rollout.segments, segment),
        finish_reason="length",
        text="",
    )


def test_a_rollout_without_room_is_left_as_it_is():
    policy = small_policy()
    full = [
        r for group in sampler(policy, longest=4).sample(prompts(policy), step=1) for r in group
    ]
    again = sampler(policy, longest=4).extend(full, step=1)
    for before, after in zip(full, again, strict=True):
        if before.num_policy_tokens == 4:
            assert after.token_ids.tolist() == before.token_ids.tolist()


def test_what_does_not_fit_the_model_s_window_is_refused_before_it_is_run():
    policy = small_policy()
    assert policy.context_window == 64
    fits = prompts(policy, ["1" * 52])
    assert len(list(sampler(policy, longest=12).sample(fits, step=1))) == 1
    with pytest.raises(
        DataError, match=r"row 1: the prompt has 53 tokens.*64-token context window of small"
    ):
        list(sampler(policy, longest=12).sample(prompts(policy, ["1" * 53]), step=1))


def test_the_sampler_says_which_weights_it_really_has():
    policy = small_policy()
    engine = sampler(policy)
    before = engine.load(Weights(version=0, fingerprint="", location="process"))
    assert before.fingerprint == fingerprint(policy.lm)
    with torch.no_grad():
        next(policy.lm.parameters()).add_(1e-6)
    assert engine.load(Weights(version=1, fingerprint="", location="process")) != before
    (group,) = engine.sample(prompts(policy)[:1], step=1)
    assert group[0].segments[0].weight_version == 1


def test_gradient_checkpointing_does_not_cost_the_cache():
    policy = small_policy(gradient_checkpointing=True)
    plain = by_name(sampler(small_policy()).sample(prompts(policy), step=1))
    thrifty = by_name(sampler(policy).sample(prompts(policy), step=1))
    assert policy.lm.training
    for name, rollout in plain.items():
        assert rollout.token_ids.tolist() == thrifty[name].token_ids.tolist()


def test_a_row_is_run_until_it_ends_and_no_longer():
    policy = small_policy()
    ends = (policy.eos_ids[0], *range(3, 12))
    many = type(policy)(**{**_fields(policy), "eos_ids": ends})
    shapes = []
    hook = policy.lm.get_decoder().register_forward_pre_hook(
        lambda _, __, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    made = by_name(sampler(many, longest=30).sample(prompts(policy), step=1)).values()
    hook.remove()
    (prefilled, _), *after = shapes
    assert prefilled == len(TEXTS)  # a prompt once for all of its group
    assert len({len(r.token_ids) for r in made}) > 4
    # the last token of a completion is not looked behind
    assert sum(rows for rows, _ in after) == sum(len(r.token_ids) - 1 for r in made)


def other_model(kind, **settings):
    """Return a small model of another kind, in which all rows have opinions."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tiny_tokenizer()),
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        initializer_range=0.3,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        **{"max_position_embeddings": 64, **settings},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, f"{kind}ForCausalLM")(config)


FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = {
    "query heads in groups": ("Llama", {}),
    "groups, without PyTorch's attention": ("Llama", {"attn_implementation": "eager"}),
    "a sliding window": ("Mistral", {"sliding_window": 6}),
    "some sliding windows": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 6, "layer_types": [FULL, SLIDING] * 2},
    ),
    "convolutions": (
        "Lfm2",
        {"layer_types": ["conv", FULL, "conv", FULL], "block_auto_adjust_ff_dim": False},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_other_kinds_read_what_stands_before_a_token(kind):
    name, settings = KINDS[kind]
    policy = small_policy(model=other_model(name, **settings))
    before = policy.lm.config._attn_implementation
    groups = []
    for group in sampler(policy, longest=20).sample(prompts(policy), step=1):
        assert policy.lm.config._attn_implementation == before  # whoever scores meanwhile
        groups.append(group)
    made = by_name(groups)
    assert len({len(r.token_ids) for r in made.values()}) > 2
    for rollout in made.values():
        (segment,) = rollout.segments
        np.testing.assert_allclose(segment.logp_sampler, scored(policy, rollout), atol=1e-4)


def test_a_completion_longer_than_the_room_of_a_cache_reads_all_of_it():
    policy = small_policy(model=other_model("Llama", max_position_embeddings=256))
    endless = type(policy)(**{**_fields(policy), "eos_ids": ()})
    made = by_name(
        sampler(endless, group_size=2, longest=3 * BLOCK).sample(prompts(policy), step=1)
    )
    for rollout in made.values():
        (segment,) = rollout.segments
        assert len(segment.token_ids) == 3 * BLOCK
        np.testing.assert_allclose(segment.logp_sampler, scored(policy, rollout), atol=1e-4)


def test_an_adapter_is_sampled_from():
    policy = small_policy(lora_rank=2)
    with torch.no_grad():
        for name, p in policy.lm.named_parameters():
            if "lora_B" in name:
                p.normal_(generator=torch.Generator().manual_seed(0))
    made = by_name(sampler(policy).sample(prompts(policy), step=1))
    with policy.lm.disable_adapter():
        base = by_name(sampler(policy).sample(prompts(policy), step=1))
    assert any(made[n].token_ids.tolist() != base[n].token_ids.tolist() for n in made)
    for rollout in made.values():
        (segment,) = rollout.segments
        np.testing.assert_allclose(segment.logp_sampler, scored(policy, rollout), atol=1e-4)


def test_a_model_that_reads_into_another_cache_is_refused():
    config = transformers.MambaConfig(
        vocab_size=len(tiny_tokenizer()), hidden_size=16, num_hidden_layers=1, eos_token_id=1
    )
    policy = small_policy(model=transformers.MambaForCausalLM(config))
    with pytest.raises(
        ConfigError, match=r"a MambaModel, whose cache is not .*sampler\.type: vllm"
    ):
        list(sampler(policy).sample(prompts(policy), step=1))
