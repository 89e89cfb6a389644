"""When the reference moves: every step (EMA), every N steps, or on a reward plateau.

The decisions are functions of the recipe, the step and the rewards. The learner moves the
reference; each reset is an event.
"""

from collections.abc import Sequence

import numpy as np

from klinic.evidence.record import StepRecord
from klinic.recipe.sections import ReferenceSection
from klinic.rewards.scores import StepRewards, nan_mean
from klinic.training.protocol import TrainingRun
from klinic.training.state import CompletedStep

RewardHistory = tuple[float | None, ...]
"""Mean rewards of the last steps; None for a step without rewards."""


def update_reference(
    run: TrainingRun, completed: CompletedStep, scores: StepRewards, history: RewardHistory
) -> RewardHistory:
    """Move the reference if it is due, and return the updated reward history."""
    rule = run.recipe.reference
    rewards = extend_reward_history(rule, history, scores)
    committed = completed.num_discarded < run.recipe.learner.updates_per_batch
    keep = fraction_to_keep(rule, completed.step, rewards, committed=committed)
    if keep is None:
        return rewards
    moved = run.learner.move_reference(
        completed.step, keep=keep, forget_moments=rule.reset_optimizer
    )
    # an EMA moves after every step: one event, but every move is recorded
    if moved is not None and moved["jumped"] == completed.step:
        message = describe_move(rule, completed.step, rewards)
        facts = {"kind": moved["kind"], "digest": moved["digest"]}
        run.record_event(completed.step, "reference", message, facts)
    return rewards


def fraction_to_keep(
    rule: ReferenceSection, step: int, rewards: Sequence[float | None], *, committed: bool
) -> float | None:
    """Return the fraction of the reference to keep after a step; None if it does not move.

    >>> rule = ReferenceSection(reset_every=2)
    >>> [fraction_to_keep(rule, step, (), committed=True) for step in (1, 2, 3, 4)]
    [None, 0.0, None, 0.0]
    """
    if rule.ema:
        return rule.ema if committed else None
    if not rule.reset_every or step % rule.reset_every:
        return None
    if rule.on_plateau and not has_plateaued(rewards, rule.reset_every):
        return None
    return 0.0


def last_reset(rule: ReferenceSection, record: StepRecord) -> int:
    """Return the step after which the reference of a record was reset; 0 for never."""
    moved = record.facts.get("reference_step")
    # an EMA moves after every step, but is not equal to the policy
    return moved if isinstance(moved, int) and not rule.ema else 0


def has_plateaued(rewards: Sequence[float | None], window: int) -> bool:
    """Whether the mean of the last `window` rewards is not above that of the `window` before them.

    Steps without a reward are skipped; without two windows there is no plateau.

    >>> has_plateaued([0.1, 0.3, 0.2, 0.2], 2), has_plateaued([0.1, 0.3, 0.2, 0.3], 2)
    (True, False)
    >>> has_plateaued([0.5, 0.5], 2)
    False
    """
    if len(rewards) < 2 * window:
        return False
    earlier, later = _mean_reward(rewards[-2 * window : -window]), _mean_reward(rewards[-window:])
    return earlier is not None and later is not None and later <= earlier


def extend_reward_history(
    rule: ReferenceSection, history: RewardHistory, scores: StepRewards
) -> RewardHistory:
    """Return the mean rewards of as many steps as a plateau test needs."""
    if not rule.on_plateau:
        return ()
    reward = nan_mean(scores.total)
    return (*history, None if np.isnan(reward) else reward)[-2 * rule.reset_every :]


def describe_move(rule: ReferenceSection, step: int, rewards: Sequence[float | None]) -> str:
    """Return the message of a moved reference."""
    if rule.ema:
        return f"the reference is now an EMA of the policy with decay {rule.ema:g}."
    message = f"the reference is now the policy after step {step}"
    if rule.on_plateau:
        window = rule.reset_every
        earlier, later = (
            _mean_reward(rewards[-2 * window : -window]),
            _mean_reward(rewards[-window:]),
        )
        message += f": mean reward {later:.4f} in the last {window} steps, {earlier:.4f} before"
    return message + ("; the AdamW moments are reset." if rule.reset_optimizer else ".")


def _mean_reward(rewards: Sequence[float | None]) -> float | None:
    present = [reward for reward in rewards if reward is not None]
    return sum(present) / len(present) if present else None
