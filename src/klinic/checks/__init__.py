"""The catalogue of checks, one file per cause. To add one, write its file and list it here.

base            `Case`, `Finding`, `Check` and the stages
measures        measurements that several checks share
reward_evidence rewards pooled over steps: noise, prompts alone, paid answers
advantage_grouping  which rows' rewards explain the advantages
folded_ids      ids that replaced the sampled ones
reference_distance  a distance of policy and reference that vanishes
other_rows      log-probs that are those of another row
copied_samples  copies of completions, found without log-probs
row_texts       the texts of records whose tokens are characters
run_on_texts    completions that run on into turns of the user
gap_models      explanations of the gap between sampler and learner, which compete
gap_contexts    tokens that were sampled after the same context, and turns of a row
gap_tokens      the tokens that they are fitted to
loss_models     signs of the terms of the recorded loss, for checks without a probe
loss_fit        least-squares fits of that loss by the values of its possible terms
loss_values     these values, from the record of a step
sampler_sync    cause of a distance between sampler and policy right after a sync
<cause>         the check of that cause, with `CHECK`
"""

from klinic.checks import (
    advantage_explodes,
    broken_reward,
    broken_sampler,
    cliff_rewards,
    clip_range_wrong,
    context_truncated,
    corrupted_sync,
    dropout_in_scoring,
    entropy_term_wrong,
    equal_rewards,
    gap_grows_with_position,
    gradient_not_cleared,
    hidden_sampling_transform,
    imprecise_logp,
    kl_controller_reversed,
    kl_gradient_wrong,
    kl_not_applied,
    kl_sign_flipped,
    kl_tail_dominates,
    layout_changes_logp,
    loss_scaled_wrong,
    malformed_output,
    malformed_prompt,
    misaligned_logp,
    misplaced_advantage,
    moved_reference,
    nan_outside_mask,
    policy_does_not_move,
    policy_gradient_wrong,
    prompt_mismatch,
    random_weights,
    ranks_diverge,
    ratio_not_applied,
    retokenised,
    reward_hacking,
    routing_mismatch,
    samples_too_old,
    stale_prefix_cache,
    stale_sampler,
    stale_teacher_prompts,
    state_lost,
    step_too_big,
    stop_token_fault,
    swapped_teacher,
    teacher_as_reference,
    teacher_gradient_wrong,
    temperature_on_one_side,
    truncation_not_mirrored,
    unexplained_gap,
    unnormalised_logp,
    wrong_groups,
    wrong_loss_mask,
    wrong_metric,
    wrong_reference,
    wrong_tokenizer,
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
    ratio_not_applied.CHECK,
    policy_gradient_wrong.CHECK,
    gradient_not_cleared.CHECK,
    clip_range_wrong.CHECK,
    kl_controller_reversed.CHECK,
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
    malformed_prompt.CHECK,
    cliff_rewards.CHECK,
    unnormalised_logp.CHECK,
    truncation_not_mirrored.CHECK,
    gap_grows_with_position.CHECK,
    corrupted_sync.CHECK,
    misplaced_advantage.CHECK,
    ranks_diverge.CHECK,
    state_lost.CHECK,
    entropy_term_wrong.CHECK,
    wrong_tokenizer.CHECK,
    swapped_teacher.CHECK,
    teacher_as_reference.CHECK,
    teacher_gradient_wrong.CHECK,
    stale_teacher_prompts.CHECK,
    unexplained_gap.CHECK,
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
