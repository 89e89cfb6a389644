"""The page of metrics names every metric, and no others."""

import re
from pathlib import Path

import numpy as np

from klinic.evidence.metrics import clip_metrics, penalized_reward, step_metrics
from klinic.learner.objective import TeacherTerm
from klinic.learner.protocol import LossScales
from klinic.maths.kl_coef import KLCoefState
from klinic.recipe.sections import KLSection
from klinic.rewards.scores import StepRewards, reward_statistics
from klinic.training.kl_control import controller_metrics
from tiny_policies import batch_of, drifted_reference, learner_of, rollouts, small_policy

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
ELSEWHERE = {
    *("kl_new_old", "updates_left", "completions/kl_dropped"),
    *("loss", "kl_penalty", "reward_scale", "discarded", "completions/parse_rate", "kl_to_start"),
    "teacher_penalty",
    *("time/sample", "time/reward", "time/learn", "time/ahead", "sampling/staleness"),
    *("eval/accuracy", "eval/accuracy/SKILL", "eval/retention", "eval/reward"),
    *("eval/retention_reward", "eval/rewards/NAME", "sampling/rounds", "sampling/groups_dropped"),
    *("sampling/sync_gap_repeated", "sampling/sync_gap_fresh"),
}


def measured():
    """Return the names of what a real step measures, made general."""
    policy = small_policy()
    reference, teacher = drifted_reference(policy), drifted_reference(policy, by=0.2)
    term = TeacherTerm(estimator="exact", coef=1.0)
    learner = learner_of(policy, reference, teacher_model=teacher, teacher=term)
    scored = learner.score(batch_of(rollouts(), step=11), needs_reference=True)
    prepared = learner.prepare(scored, LossScales(kl_coef=0.1))
    names = {*step_metrics(prepared.record), *prepared.metrics}
    names |= set(clip_metrics(prepared.record, clip_low=0.2, clip_high=0.2))
    names |= {*penalized_reward(prepared.record, 0.1), *learner.commit()}
    names |= set(controller_metrics(KLSection(controller="band"), KLCoefState(coef=0.1)))
    scores = StepRewards(
        total=np.ones(2), parts={"NAME": np.ones(2)}, num_missing=0, num_nonfinite=0
    )
    names |= set(reward_statistics(scores))
    return {
        re.sub(r"^((teacher/)?kl_(k3|k1|exact))/.*", r"\1/…", name) for name in names
    } | ELSEWHERE


def test_page_and_metrics_agree():
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])}
    assert named == measured()
