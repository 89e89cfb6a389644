"""The catalogue of checks, one file per cause. To add one, write its file and list it here.

base            `Case`, `Finding`, `Check` and the stages
measures        measurements that several checks share
sampler_sync    cause of a distance between sampler and policy right after a sync
<cause>         the check of that cause, with `CHECK`
"""

from klinic.checks import (
    advantage_explodes,
    broken_reward,
    broken_sampler,
    cliff_rewards,
    context_truncated,
    dropout_in_scoring,
    equal_rewards,
    hidden_sampling_transform,
    imprecise_logp,
    kl_gradient_wrong,
    kl_not_applied,
    kl_sign_flipped,
    kl_tail_dominates,
    layout_changes_logp,
    loss_scaled_wrong,
    malformed_output,
    misaligned_logp,
    moved_reference,
    nan_outside_mask,
    policy_does_not_move,
    prompt_mismatch,
    random_weights,
    retokenised,
    reward_hacking,
    routing_mismatch,
    samples_too_old,
    stale_prefix_cache,
    stale_sampler,
    step_too_big,
    stop_token_fault,
    temperature_on_one_side,
    wrong_groups,
    wrong_loss_mask,
    wrong_metric,
    wrong_reference,
)
from klinic.checks.base import Case, Check, Finding, Stage
from klinic.evidence.verdict import Verdict

CHECKS: tuple[Check, ...] = (
    stale_sampler.CHECK,
    temperature_on_one_side.CHECK,
    wrong_reference.CHECK,
    misaligned_logp.CHECK,
    retokenised.CHECK,
    wrong_loss_mask.CHECK,
    kl_gradient_wrong.CHECK,
    kl_not_applied.CHECK,
    kl_sign_flipped.CHECK,
    kl_tail_dominates.CHECK,
    nan_outside_mask.CHECK,
    stale_prefix_cache.CHECK,
    hidden_sampling_transform.CHECK,
    stop_token_fault.CHECK,
    advantage_explodes.CHECK,
    wrong_groups.CHECK,
    equal_rewards.CHECK,
    loss_scaled_wrong.CHECK,
    imprecise_logp.CHECK,
    routing_mismatch.CHECK,
    dropout_in_scoring.CHECK,
    layout_changes_logp.CHECK,
    prompt_mismatch.CHECK,
    step_too_big.CHECK,
    policy_does_not_move.CHECK,
    broken_reward.CHECK,
    reward_hacking.CHECK,
    moved_reference.CHECK,
    samples_too_old.CHECK,
    broken_sampler.CHECK,
    wrong_metric.CHECK,
    context_truncated.CHECK,
    random_weights.CHECK,
    malformed_output.CHECK,
    cliff_rewards.CHECK,
)
"""In the order of how often and how silently each cause ruins a run."""

HYPOTHESES = {
    "H01": ("advantage-explodes", "wrong-groups"),
    "H02": ("wrong-loss-mask", "stop-token-fault"),
    "H03": ("kl-gradient-wrong", "kl-sign-flipped", "kl-tail-dominates"),
    "H04": ("context-truncated",),
    "H06": ("stale-sampler",),
}
"""Common hypotheses about an exploding KL, by number: advantage scaling, token masks, the KL
formula, truncated contexts, and weights that do not reach the sampler."""

__all__ = ["CHECKS", "HYPOTHESES", "Case", "Check", "Finding", "Stage", "Verdict"]
