"""The policy speaks, a function answers, and every token is known by who emitted it."""

import numpy as np
import pytest
import torch

from klinic.errors import ConfigError, FunctionError
from klinic.evidence.record import EmittedBy
from klinic.evidence.rollout import Prompt, flatten_rollouts
from klinic.model.chat import PromptEncoder
from klinic.model.layout import pad_rows
from klinic.sampler.multi_turn import MultiTurnSampler
from klinic.sampler.token_sampling import SamplingParams
from klinic.sampler.transformers import TransformersSampler
from tiny_policies import small_model, small_policy

ASKED = ({"role": "user", "content": "7"},)


@pytest.fixture(scope="module")
def policy():
    return small_policy(model=small_model(n_positions=400))


def prompts(policy, **columns):
    encoded = PromptEncoder(policy.tokenizer, "small")(ASKED)
    return [
        Prompt(
            index=i,
            text=encoded.text,
            token_ids=np.array(encoded.token_ids),
            columns=columns,
            messages=encoded.messages,
        )
        for i in range(3)
    ]


def conversing(policy, reply, longest=100):
    inner = TransformersSampler(
        policy, params=SamplingParams(), max_new_tokens=longest, group_size=4, seed=3
    )
    encoder = PromptEncoder(policy.tokenizer, "small")
    return MultiTurnSampler(inner, encoder, reply, window=policy.context_window)


def once(messages, **columns):
    """Answer the first turn only."""
    return "ok" if len(messages) == 2 else None


def sampled(policy, reply, **how):
    groups = list(conversing(policy, reply, **how).sample(prompts(policy, hint="x"), step=1))
    assert [[r.sample for r in group] for group in groups] == [[0, 1, 2, 3]] * 3
    return [rollout for group in groups for rollout in group]


def test_two_turns_are_three_segments_and_only_the_policy_is_trained_on(policy):
    rollouts = sampled(policy, once)
    two = [r for r in rollouts if len(r.segments) == 3]
    assert two
    for rollout in two:
        assert [s.emitted_by for s in rollout.segments] == [
            EmittedBy.POLICY, EmittedBy.TOOL, EmittedBy.POLICY,
        ]  # fmt: skip
        assert [m["role"] for m in rollout.messages] == ["assistant", "tool", "assistant"]
        bridge = policy.tokenizer.decode(rollout.segments[1].token_ids)
        assert bridge == "\ntool: ok<|eos|>\nassistant: "
    record = flatten_rollouts(rollouts, step=1)
    assert np.array_equal(record.loss_mask, record.emitted_by == EmittedBy.POLICY)
    assert np.isnan(record.logp_sampler[~record.loss_mask]).all()


def test_every_log_prob_is_that_of_the_whole_chat(policy):
    for rollout in sampled(policy, once):
        layout = pad_rows(
            [rollout.prompt.token_ids], [rollout.token_ids], pad_id=0, device=torch.device("cpu")
        )
        with torch.no_grad():
            logp = policy.scorer(layout).logp.numpy()
        record = flatten_rollouts([rollout], step=1)
        np.testing.assert_allclose(
            logp[record.loss_mask], record.logp_sampler[record.loss_mask], atol=1e-4
        )


def test_the_function_sees_the_chat_and_the_columns(policy):
    seen = []

    def reply(messages, hint):
        seen.append((tuple(m["role"] for m in messages), hint))
        messages.clear()  # what it does to its copy is its own affair

    rollouts = sampled(policy, reply)
    assert set(seen) == {(("user", "assistant"), "x")}
    assert all(len(r.segments) == 1 for r in rollouts)


def test_a_chat_ends_at_the_limit_of_tokens(policy):
    rollouts = sampled(policy, lambda messages, **_: "go on", longest=150)
    assert all(r.num_policy_tokens <= 150 for r in rollouts)
    assert any(len(r.segments) > 3 for r in rollouts)
    assert all(r.finish_reason == "length" for r in rollouts)


@pytest.mark.timeout(120)
def test_a_turn_that_uses_the_last_token_ends_the_chat(policy):
    two = next(r for r in sampled(policy, once) if len(r.segments) == 3)
    longest = len(two.segments[0].token_ids)
    rollouts = sampled(policy, lambda messages, **_: "go on", longest=longest)
    same = rollouts[two.prompt.index * 4 + two.sample]
    assert same.num_policy_tokens == longest
    assert [s.emitted_by for s in same.segments] == [EmittedBy.POLICY, EmittedBy.TOOL]
    assert all(r.finish_reason == "length" for r in rollouts)


def test_an_answer_longer_than_the_model_ends_the_chat(policy):
    rollouts = sampled(policy, lambda messages, **_: "a" * 500, longest=100)
    ended = [r for r in rollouts if r.token_ids[-1] in policy.eos_ids]
    assert ended
    for rollout in ended:
        assert len(rollout.segments) == 1
        assert rollout.finish_reason == "length"


def test_an_answer_that_leaves_little_room_shortens_the_next_turn(policy):
    rollouts = sampled(policy, lambda messages, **_: "a" * 300, longest=100)
    lengths = [len(r.prompt.token_ids) + len(r.token_ids) for r in rollouts]
    assert max(lengths) <= 400
    assert any(len(r.segments) == 3 for r in rollouts)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (lambda messages, **_: 1 / 0, "completion . of row .: ZeroDivisionError"),
        (lambda messages: "x", "unexpected keyword argument 'hint'"),
        (lambda messages, **_: 5, "sampling.reply returned 5"),
        (
            lambda messages, **_: {"role": "assistant", "content": "x"},
            "any role but assistant, which is the policy",
        ),
    ],
)
def test_an_answer_that_cannot_be_used_is_named(policy, reply, says):
    with pytest.raises(FunctionError, match=says):
        sampled(policy, reply)


def test_a_text_has_no_turns(policy):
    text = [Prompt(index=0, text="1", token_ids=np.array([3]), columns={})]
    with pytest.raises(ConfigError, match="needs chat prompts, but `prompt` is plain text"):
        list(conversing(policy, once).sample(text, step=1))


def test_a_template_that_rewrites_history_is_refused_before_anything_is_sampled(policy):
    class Never:
        def load(self, weights):
            raise AssertionError

        sample = extend = greedy = close = load

    encoder = PromptEncoder(policy.tokenizer, "small")
    kept = policy.tokenizer.chat_template
    policy.tokenizer.chat_template = "{{ messages | length }}" + kept
    try:
        with pytest.raises(ConfigError, match="rewrites history"):
            list(
                MultiTurnSampler(Never(), encoder, once, window=None).sample(
                    prompts(policy), step=1
                )
            )
    finally:
        policy.tokenizer.chat_template = kept
