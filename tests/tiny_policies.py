"""A policy of a few thousand weights, and batches of completions for it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from klinic.evidence.record import EmittedBy, StepRecord
from klinic.evidence.rollout import Prompt, Rollout, Segment, flatten_rollouts
from klinic.learner.local import LocalLearner
from klinic.learner.objective import Objective
from klinic.learner.settings import LearnerSettings
from klinic.learner.update import LearningRate
from klinic.maths.importance import ImportanceSampling
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.maths.surrogate import SURROGATES
from klinic.model.loading import Policy, prepare_policy
from klinic.model.reference import Reference, copy_as_reference, make_adapter_off_reference
from klinic.model.tiny import tiny_tokenizer
from klinic.model.token_filters import NO_FILTERS
from klinic.recipe.sections import ModelSection
from klinic.rewards.scores import StepRewards, with_rewards

LONGEST = 6


def small_model(**config: Any) -> GPT2LMHeadModel:
    """Return a GPT-2 of two small layers, far enough from uniform to have opinions.

    GPT-2, because it computes in float64 from end to end when asked to (others normalise and rotate
    in float32 whatever their weights are), and because its dropouts are on unless put out.
    """
    tokenizer = tiny_tokenizer()
    settings = {
        "vocab_size": len(tokenizer),
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
        "initializer_range": 0.3,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        **config,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(**settings))


def small_policy(
    *, double: bool = False, temperature: float = 1.0, model: Any = None, **section: Any
) -> Policy:
    """Return the small model as a policy."""
    lm = small_model() if model is None else model
    return prepare_policy(
        lm.double() if double else lm,
        tiny_tokenizer(),
        ModelSection(name="small", **section),
        temperature=temperature,
        seed=0,
    )


def drifted_reference(policy: Policy, by: float = 0.05) -> Reference:
    """Return the policy's weights, each moved a little, as the reference."""
    reference = copy_as_reference(policy.scorer, source="drifted")
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for p in reference.scorer.lm.parameters():
            p.add_(by * torch.randn_like(p))
    return reference


def own_reference(policy: Policy, lora: bool) -> Reference:
    """Return the policy as it is now as the reference."""
    return (make_adapter_off_reference if lora else copy_as_reference)(policy.scorer, source="own")


def rollouts(num_prompts: int = 4, group_size: int = 4, seed: int = 0) -> list[Rollout]:
    """Return random completions of random prompts, of many lengths, some with a tool's text."""
    stream = np.random.default_rng(seed)
    made = []
    for index in range(num_prompts):
        ids = stream.integers(3, 50, stream.integers(1, 7))
        prompt = Prompt(index=index, text=f"p{index}", token_ids=ids, columns={})
        for sample in range(group_size):
            segments = [_said(stream, EmittedBy.POLICY)]
            if sample % 3 == 2:
                segments += [_said(stream, EmittedBy.TOOL), _said(stream, EmittedBy.POLICY)]
            made.append(
                Rollout(
                    prompt=prompt,
                    sample=sample,
                    segments=tuple(segments),
                    finish_reason="length" if sample == 1 else "stop",
                    text="",
                )
            )
    return made


def _said(stream: np.random.Generator, by: EmittedBy) -> Segment:
    num = int(stream.integers(1, LONGEST))
    policy = by is EmittedBy.POLICY
    return Segment(
        token_ids=stream.integers(3, 50, num),
        emitted_by=by,
        logp_sampler=-stream.random(num).astype(np.float32) * 4 if policy else None,
        weight_version=0,
    )


def batch_of(made: Sequence[Rollout], *, step: int = 2, advantage: str = "group_std") -> StepRecord:
    """Return completions with rewards that depend on them alone, not on their order."""
    total = np.array([float(r.token_ids.sum() % 7) for r in made])
    scores = StepRewards(total=total, parts={"r": total}, num_missing=0, num_nonfinite=0)
    return with_rewards(flatten_rollouts(made, step=step), scores, advantage=advantage)


def learner_of(
    policy: Policy,
    reference: Reference | None,
    *,
    micro_batch_size: int = 64,
    teacher_model: Reference | None = None,
    **changes: Any,
) -> LocalLearner:
    """Return a learner with usual settings, changed where asked."""
    objective = {
        "loss": "dr_grpo",
        "estimator": "unbiased",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "mask_truncated": False,
        "max_new_tokens": 3 * LONGEST,
        "importance_sampling": ImportanceSampling(),
        "corrects_policy_term": False,
        "teacher": None,
    }
    settings = {
        "learning_rate": LearningRate(peak=1e-2, total_steps=100),
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "updates_per_batch": 1,
        "packed": False,
        "filters": NO_FILTERS,
    }
    objective |= {k: v for k, v in changes.items() if k in objective}
    settings |= {k: v for k, v in changes.items() if k in settings}
    return LocalLearner(
        policy,
        reference,
        objective=Objective(**objective),
        settings=LearnerSettings(micro_batch_size=micro_batch_size, **settings),
        teacher=teacher_model,
    )


def gradient(policy: Policy) -> torch.Tensor:
    """Return the gradient of all weights in one vector."""
    return torch.cat(
        [
            torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
            for p in weights(policy)
        ]
    )


def weights(policy: Policy) -> list[torch.Tensor]:
    """Return what is trained."""
    return [p for p in policy.lm.parameters() if p.requires_grad]


LOSSES_AND_ESTIMATORS = [
    (loss, estimator)
    for loss in SURROGATES
    for estimator in (None, *ESTIMATORS)
    if (SURROGATES[loss].aggregation, estimator) != ("sequence_mean", "sequence")
]
"""Every pair that a recipe may have."""


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return how far a vector is from another, as a share of that one's length."""
    return float((a - b).norm() / b.norm())
