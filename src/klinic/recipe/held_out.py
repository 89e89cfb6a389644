"""The `eval` and `retention` sections: prompts for evaluation, never trained on."""

from klinic.recipe.rewards import Rewards
from klinic.recipe.section import Section, Text


class EvalSection(Section):
    """Held-out prompts of the trained skill."""

    path: Text
    """Held-out prompts, in the format of `data.path`; `data.map` applies to them too."""
    rewards: Rewards = ()
    """Reward functions for evaluation; empty: those of training."""


class RetentionSection(Section):
    """Prompts of other skills, to measure forgetting."""

    path: Text
    """Prompts of other skills, in the format of `data.path`."""
    rewards: Rewards
    """Reward functions for these prompts."""
