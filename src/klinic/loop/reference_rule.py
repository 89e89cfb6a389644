"""When the reference moves: every step (EMA), every N steps, or on a reward plateau.

The decisions are functions of the recipe, the step and the rewards. The learner moves the
reference; each reset is an event.
"""

from collections.abc import Sequence

import numpy as np

from klinic.loop.parts import Parts
from klinic.loop.state import StepDone
from klinic.recipe.reference import ReferenceSection
from klinic.rewards.scores import Scores, mean

Rewards = tuple[float | None, ...]
"""Mean rewards of the last steps; None for a step without rewards."""


def follow(parts: Parts, done: StepDone, scores: Scores, before: Rewards) -> Rewards:
    """Move the reference if it is due, and return the updated reward history."""
    rule = parts.reference_rule
    rewards = remembered(rule, before, scores)
    committed = done.discarded < parts.updates_per_batch
    keep = share_to_keep(rule, done.step, rewards, committed=committed)
    if keep is None:
        return rewards
    moved = parts.learner.move_reference(done.step, keep=keep, forget_moments=rule.reset_optimizer)
    # an EMA moves after every step: one event, but every move is recorded
    if moved is not None and moved["jumped"] == done.step:
        facts = {name: moved[name] for name in ("kind", "digest")}
        parts.event(done.step, "reference", sentence(rule, done.step, rewards), **facts)
    return rewards


def share_to_keep(
    rule: ReferenceSection, step: int, rewards: Sequence[float | None], *, committed: bool
) -> float | None:
    """Return the fraction of the reference to keep after a step; None if it does not move.

    >>> rule = ReferenceSection(reset_every=2)
    >>> [share_to_keep(rule, step, (), committed=True) for step in (1, 2, 3, 4)]
    [None, 0.0, None, 0.0]
    """
    if rule.ema:
        return rule.ema if committed else None
    if not rule.reset_every or step % rule.reset_every:
        return None
    if rule.on_plateau and not plateaued(rewards, rule.reset_every):
        return None
    return 0.0


def plateaued(rewards: Sequence[float | None], window: int) -> bool:
    """Whether the mean of the last `window` rewards is not above that of the `window` before them.

    Steps without a reward are skipped; without two windows there is no plateau.

    >>> plateaued([0.1, 0.3, 0.2, 0.2], 2), plateaued([0.1, 0.3, 0.2, 0.3], 2)
    (True, False)
    >>> plateaued([0.5, 0.5], 2)
    False
    """
    if len(rewards) < 2 * window:
        return False
    earlier, later = _mean(rewards[-2 * window : -window]), _mean(rewards[-window:])
    return earlier is not None and later is not None and later <= earlier


def remembered(rule: ReferenceSection, before: Rewards, scores: Scores) -> Rewards:
    """Return the mean rewards of as many steps as a plateau test needs."""
    if not rule.on_plateau:
        return ()
    reward = mean(scores.total)
    return (*before, None if np.isnan(reward) else reward)[-2 * rule.reset_every :]


def sentence(rule: ReferenceSection, step: int, rewards: Sequence[float | None]) -> str:
    """Return the message of a moved reference."""
    if rule.ema:
        return f"the reference is now an EMA of the policy with decay {rule.ema:g}."
    said = f"the reference is now the policy after step {step}"
    if rule.on_plateau:
        window = rule.reset_every
        earlier, later = _mean(rewards[-2 * window : -window]), _mean(rewards[-window:])
        said += f": mean reward {later:.4f} in the last {window} steps, {earlier:.4f} before"
    return said + ("; the AdamW moments are reset." if rule.reset_optimizer else ".")


def _mean(rewards: Sequence[float | None]) -> float | None:
    known = [reward for reward in rewards if reward is not None]
    return sum(known) / len(known) if known else None
