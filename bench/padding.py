"""What rows of similar length save: learning from a step cut as klinic cuts it, and by neighbours.

Completions of log-normal length, in micro-batches of eight. Neighbours is what trainers do whose
rows are padded to the longest of a batch in the order they came.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.harness import Claim, measure
from bench.step import opened
from klinic.evidence.record import EmittedBy, StepRecord
from klinic.evidence.rollout import Prompt, Rollout, Segment, flatten_rollouts
from klinic.learner.local import LocalLearner
from klinic.learner.objective import Objective
from klinic.learner.packing import lay_out_batches
from klinic.learner.protocol import LossScales
from klinic.learner.scored_batch import ScoredBatch
from klinic.learner.settings import LearnerSettings
from klinic.learner.update import LearningRate
from klinic.model.loading import load_policy
from klinic.recipe.sections import ModelSection
from klinic.rewards.scores import StepRewards, with_rewards

ROWS, MICRO, PROMPT = 64, 8, 16
SHARE = 0.8  # of what there is to be won


def lengths() -> np.ndarray:
    """Return the lengths of the completions."""
    stream = np.random.default_rng(0)
    return np.clip(stream.lognormal(4.0, 1.0, ROWS), 4, 512).astype(int)


def padding(*, tell: Callable[[str], None], **how: Any) -> dict[str, Any]:
    """Compare the two ways to cut, on the same tokens."""
    with opened("10M") as bench:
        learner, scored, padded = _both(bench.model)
        arms = {
            "neighbours": lambda: learner.prepare(padded, LossScales(kl_coef=0.0)),
            "similar": lambda: learner.prepare(scored, LossScales(kl_coef=0.0)),
        }
        useful = int((lengths() + PROMPT).sum())
        share = useful / sum(b.layout.input_ids.numel() for b in padded.batches)
        must = SHARE / share
        name = f"padding: useful tokens a second, similar / neighbours ({share:.0%} useful)"
        claim = Claim(
            name=name, arm="similar", over="neighbours", must=must, side="at least", inverted=True
        )
        measured = measure(arms, [claim], tell=tell, **how)
    return {"ratios": measured.pop("ratios"), "raw": measured}


def _both(model: Path) -> tuple[LocalLearner, ScoredBatch, ScoredBatch]:
    """Return a learner, and a step as it cuts it and as neighbours."""
    policy = load_policy(ModelSection(name=str(model)), temperature=1.0, seed=0)
    objective = Objective(
        loss="dr_grpo",
        estimator=None,
        clip_low=0.2,
        clip_high=0.2,
        mask_truncated=False,
        max_new_tokens=512,
    )
    settings = LearnerSettings(
        learning_rate=LearningRate(peak=1e-6, total_steps=10**6),
        weight_decay=0.0,
        max_grad_norm=1.0,
        micro_batch_size=MICRO,
        updates_per_batch=1,
    )
    learner = LocalLearner(policy, None, objective=objective, settings=settings)
    record = _record()
    scored = learner.score(record, needs_reference=False)
    neighbours = [(np.arange(start, start + MICRO), True) for start in range(0, ROWS, MICRO)]
    batches = lay_out_batches(record, neighbours, pad_id=policy.pad_id, device=torch.device("cpu"))
    return learner, scored, replace(scored, batches=batches, ref_hidden=[None] * len(batches))


def _record() -> StepRecord:
    stream = np.random.default_rng(1)
    rollouts = []
    for row, length in enumerate(lengths()):
        prompt = Prompt(
            index=row // MICRO, text="", token_ids=stream.integers(0, 8000, PROMPT), columns={}
        )
        said = Segment(
            token_ids=stream.integers(0, 8000, length),
            emitted_by=EmittedBy.POLICY,
            logp_sampler=np.full(length, -9.0, dtype=np.float32),
            weight_version=0,
        )
        rollouts.append(
            Rollout(
                prompt=prompt, sample=row % MICRO, segments=(said,), text="", finish_reason="stop"
            )
        )
    total = stream.random(ROWS)
    scores = StepRewards(total=total, parts={"r": total}, num_missing=0, num_nonfinite=0)
    return with_rewards(flatten_rollouts(rollouts, step=2), scores, advantage="group_std")
