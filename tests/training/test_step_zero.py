"""Before the first update policy, old policy, sampler and reference are one model, and it shows.

The small model says so in every run of the tests; a real one, of 135M weights and a chat template,
when its folder is named: KLINIC_SMOLLM2=/path pytest -m slow tests/training/test_step_zero.py -s
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from klinic.evidence.metrics import clip_metrics, step_metrics
from klinic.evidence.rollout import Prompt, Rollout, flatten_rollouts
from klinic.learner.local import LocalLearner
from klinic.learner.protocol import LossScales
from klinic.maths.ratio import token_ratio
from klinic.model.reference import reference_at_start
from klinic.rewards.scores import StepRewards, with_rewards
from klinic.sampler.token_sampling import SamplingParams
from klinic.sampler.transformers import TransformersSampler
from model.foreign import policy_of, write_adapter, write_base
from tiny_policies import learner_of

KINDS = {"full": "copy", "fresh adapter": "adapter_off", "adapter further": "adapter_frozen"}
FP32 = 1e-4  # nats at a token: one-token matrices are multiplied in another order than whole rows
CHATS = (
    "What is 7 + 5?",
    "Write one sentence about a lighthouse keeper who has lost the key to the lamp room, and "
    "do not use the word light.",
)


def policy_and_reference(kind: str, base: Path, folder: Path, **section: Any):
    if kind == "adapter further":
        adapter = write_adapter(folder / "adapter", base, by=0.02, lora_dropout=0.1)
        policy = policy_of(adapter, **section)
    else:
        policy = policy_of(base, lora_rank=8 if kind == "fresh adapter" else None, **section)
    reference = reference_at_start(policy.scorer, source="start")
    assert reference.kind == KINDS[kind]
    return policy, reference


def sample(policy: Any, prompts: list[list[int]], num_tokens: int) -> list[Rollout]:
    sampler = TransformersSampler(
        policy, params=SamplingParams(), max_new_tokens=num_tokens, group_size=4, seed=0
    )
    made = [
        Prompt(index=i, text=str(i), token_ids=np.array(ids, dtype=np.int64), columns={})
        for i, ids in enumerate(prompts)
    ]
    return [rollout for group in sampler.sample(made, step=1) for rollout in group]


def first_step(learner: LocalLearner, rollouts: list[Rollout]):
    total = np.array([float(r.token_ids.sum() % 7) for r in rollouts])
    scores = StepRewards(total=total, parts={"r": total}, num_missing=0, num_nonfinite=0)
    record = with_rewards(flatten_rollouts(rollouts, step=1), scores, advantage="group_std")
    scored = learner.score(record, needs_reference=True)
    return learner.prepare(scored, LossScales(kl_coef=0.1))


def check_step_zero(policy: Any, reference: Any, prompts: list[list[int]], *, limit: float):
    """Hold a first step to its invariants; return how far the sampler's log-probs are off."""
    rollouts = sample(policy, prompts, 16)
    # rows of two prompts share a micro-batch, so that padding is part of the question
    prepared = first_step(learner_of(policy, reference, micro_batch_size=8), rollouts)
    record = prepared.record
    trained = record.loss_mask
    assert trained.sum() > 8
    np.testing.assert_array_equal(record.logp, record.logp_old)
    np.testing.assert_array_equal(record.logp, record.logp_ref)
    assert (token_ratio(logp=record.logp, logp_old=record.logp_old) == 1).all()
    metrics = step_metrics(record)
    assert (metrics["kl"], metrics["kl_k1/max"], metrics["kl_exact/max"]) == (0, 0, 0)
    clipped = clip_metrics(record, clip_low=0.2, clip_high=0.2, by_sequence=False)
    assert all(value == 0 for name, value in clipped.items() if name.startswith("clip_ratio"))
    assert prepared.metrics["grad_norm"] > 0
    apart = np.abs(record.logp - record.logp_sampler)[trained]
    assert apart.max() <= limit
    return apart


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [("fp32", FP32), ("bf16", 0.5)])
def test_the_tiny_model_starts_where_it_is(tmp_path, kind, gradient_checkpointing, dtype, limit):
    how = {"gradient_checkpointing": gradient_checkpointing, "dtype": dtype}
    policy, reference = policy_and_reference(kind, write_base(tmp_path / "base"), tmp_path, **how)
    prompts = [policy.tokenizer.encode(text) for text in ("1+1=", "the sum of 48 and 5 is ")]
    check_step_zero(policy, reference, prompts, limit=limit)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    "KLINIC_SMOLLM2" not in os.environ,
    reason="KLINIC_SMOLLM2 does not name a folder with SmolLM2-135M-Instruct",
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [("fp32", FP32), ("bf16", 0.5)])
def test_a_real_model_starts_where_it_is(tmp_path, kind, gradient_checkpointing, dtype, limit):
    how = {"gradient_checkpointing": gradient_checkpointing, "dtype": dtype}
    base = Path(os.environ["KLINIC_SMOLLM2"])
    policy, reference = policy_and_reference(kind, base, tmp_path, **how)
    prompts = [chat(policy.tokenizer, text) for text in CHATS]
    apart = check_step_zero(policy, reference, prompts, limit=limit)
    print(  # noqa: T201 - for the log
        f"{dtype} {kind}, checkpointing {gradient_checkpointing}: |logp - logp_sampler| "
        f"max {apart.max():.1e} mean {apart.mean():.1e} over {len(apart)} tokens"
    )


def chat(tokenizer: Any, text: str) -> list[int]:
    message = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    return list(ids)


def test_one_forward_of_the_reference_that_is_off_would_show(tmp_path):
    base = write_base(tmp_path / "base")
    policy, reference = policy_and_reference("adapter further", base, tmp_path)
    prompts = [policy.tokenizer.encode("1+1=")] * 2
    with torch.no_grad():
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.reference.weight"
        dict(policy.lm.named_parameters())[name][0, 0] += 0.01
    with pytest.raises(AssertionError):
        check_step_zero(policy, reference, prompts, limit=FP32)
