"""Selects the completion that shows a cause, by the kind of its evidence."""

from collections.abc import Mapping

from klinic.checks.base import Case
from klinic.report import reward_selectors as rewards
from klinic.report import token_selectors as tokens
from klinic.report.evidence_row import EvidenceRow, RowSelector

SAMPLER, REFERENCE, UPDATE = (tokens.gap_to(lane) for lane in ("sampler", "reference", "update"))

BY_CAUSE: Mapping[str, tuple[RowSelector, ...]] = {
    "wrong-loss-mask": (tokens.foreign_tokens, tokens.left_out_tokens),
    "stop-token-fault": (
        *(tokens.end_inside, tokens.cut_at_end, tokens.ended_prompt, tokens.untrained_end),
    ),
    "context-truncated": (tokens.truncated,),
    "nan-outside-mask": (tokens.not_finite_outside,),
    "broken-sampler": (tokens.unknown_ids, tokens.lost_logps, rewards.equal_twins),
    "unnormalised-logp": (tokens.above_zero, tokens.highest_entropy),
    "retokenised": (tokens.reencoded, SAMPLER),
    "prompt-mismatch": (tokens.other_prompt, SAMPLER),
    "misaligned-logp": (SAMPLER, REFERENCE),
    "random-weights": (tokens.highest_entropy,),
    "dropout-in-scoring": (SAMPLER, UPDATE, REFERENCE),
    "layout-changes-logp": (SAMPLER, REFERENCE),
    "stale-prefix-cache": (tokens.cached_prompt, SAMPLER),
    "samples-too-old": (tokens.oldest_samples,),
    "ratio-not-applied": (tokens.oldest_samples, UPDATE, SAMPLER),
    "routing-mismatch": (tokens.other_experts, SAMPLER),
    "stale-sampler": (SAMPLER,),
    "corrupted-sync": (SAMPLER,),
    "temperature-on-one-side": (SAMPLER, REFERENCE),
    "hidden-sampling-transform": (SAMPLER,),
    "imprecise-logp": (SAMPLER,),
    "truncation-not-mirrored": (SAMPLER,),
    "gap-grows-with-position": (SAMPLER,),
    "unexplained-gap": (SAMPLER,),
    "ranks-diverge": (SAMPLER, REFERENCE),
    "wrong-reference": (REFERENCE,),
    "moved-reference": (REFERENCE,),
    "step-too-big": (REFERENCE, UPDATE),
    "kl-sign-flipped": (REFERENCE,),
    "kl-not-applied": (REFERENCE,),
    "kl-tail-dominates": (tokens.largest_k3,),
    "broken-reward": (rewards.unequal_twins, rewards.without_reward, rewards.equal_group),
    "cliff-rewards": (rewards.lowest_reward,),
    "malformed-output": (rewards.lowest_reward,),
    "reward-hacking": (rewards.highest_reward,),
    "equal-rewards": (rewards.equal_group,),
    "advantage-explodes": (rewards.largest_advantage,),
    "wrong-groups": (
        *(rewards.unbalanced_group, rewards.opposed_advantage, rewards.largest_advantage),
    ),
    "misplaced-advantage": (rewards.bare_tokens,),
    "clip-range-wrong": (rewards.largest_advantage,),
    "entropy-term-wrong": (tokens.highest_entropy,),
}
"""Kinds of evidence by cause, the most telling first."""

IN_NO_COMPLETION: Mapping[str, str] = {
    "gradient-not-cleared": "it is in the gradient of whole steps",
    "kl-controller-reversed": "it is in the coefficient over the steps",
    "kl-gradient-wrong": "it is in the gradient of the KL term",
    "loss-scaled-wrong": "it is in the loss of whole steps",
    "policy-does-not-move": "it is in the update: its gradient, learning rate or schedule",
    "policy-gradient-wrong": "it is in the gradient of the policy term",
    "state-lost": "it is in the weights, the optimizer or a schedule",
    "malformed-prompt": "it is in the prompts of all rows",
    "stale-teacher-prompts": "it is in the prompts that the teacher scores",
    "swapped-teacher": "it is in the teacher's weights",
    "teacher-as-reference": "it is in the weights of two models",
    "teacher-gradient-wrong": "it is in the gradient of the KL to the teacher",
    "wrong-tokenizer": "it is in the teacher's vocabulary",
    "wrong-metric": "the completions are right, and the logged metric is not",
}
"""Causes that no single completion shows, and where they are instead."""


def find_evidence_row(cause: str, case: Case) -> EvidenceRow | None:
    """Return the completion of a step that shows a cause best; None if none shows it."""
    if not case.record.num_rows:
        return None
    rows = (select(case) for select in BY_CAUSE.get(cause, ()))
    return next((row for row in rows if row is not None), None)
