"""Injected faults, one mechanism per file, for the scoreboard and the demo.

base            `Fault`, its severity, and the helper that patches an attribute
in_trl          faults of a TRL trainer
vllm_traps      faults of a real vLLM engine
second          a second mechanism for most causes
<cause>         the first mechanism of that cause, with `FAULT`
"""

from klinic.faults import (
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
from klinic.faults.base import Fault, Severity

FAULTS: tuple[Fault, ...] = (
    stale_sampler.FAULT,
    temperature_on_one_side.FAULT,
    wrong_reference.FAULT,
    misaligned_logp.FAULT,
    retokenised.FAULT,
    wrong_loss_mask.FAULT,
    kl_gradient_wrong.FAULT,
    kl_not_applied.FAULT,
    kl_sign_flipped.FAULT,
    kl_tail_dominates.FAULT,
    nan_outside_mask.FAULT,
    stale_prefix_cache.FAULT,
    hidden_sampling_transform.FAULT,
    stop_token_fault.FAULT,
    advantage_explodes.FAULT,
    wrong_groups.FAULT,
    equal_rewards.FAULT,
    loss_scaled_wrong.FAULT,
    imprecise_logp.FAULT,
    dropout_in_scoring.FAULT,
    layout_changes_logp.FAULT,
    prompt_mismatch.FAULT,
    step_too_big.FAULT,
    policy_does_not_move.FAULT,
    broken_reward.FAULT,
    reward_hacking.FAULT,
    moved_reference.FAULT,
    samples_too_old.FAULT,
    broken_sampler.FAULT,
    wrong_metric.FAULT,
    context_truncated.FAULT,
    random_weights.FAULT,
    malformed_output.FAULT,
    cliff_rewards.FAULT,
)
"""In the order of `evidence.causes`; routing-mismatch has none, since no model here has experts."""

__all__ = ["FAULTS", "Fault", "Severity"]
