"""The `eval` and `retention` sections: what a policy is measured on and never trained on."""

from klinic.recipe.rewards import Rewards
from klinic.recipe.section import Section, Text


class EvalSection(Section):
    """Held-out prompts of what is trained."""

    path: Text
    """Held-out prompts, in the form of `data.path`; `data.map` applies to them too."""
    rewards: Rewards = ()
    """What judges them; none is the rewards of training."""


class RetentionSection(Section):
    """Prompts of something else, which training should not spoil."""

    path: Text
    """Prompts of something else, in the form of `data.path`."""
    rewards: Rewards
    """What judges them."""
