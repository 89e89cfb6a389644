"""The `reference` section: the reference policy of the KL, and whether it is updated."""

from typing import Annotated

from pydantic import model_validator

from klinic.recipe.section import CountOrZero, Section, Text, within


class ReferenceSection(Section):
    """The reference policy; by default the initial policy, fixed for the whole run."""

    path: Text | None = None
    """A folder or a hub id; null: the initial policy, after the warm start if there is one."""
    ema: Annotated[float, within("it is the decay of the moving average", low=0, below=1)] = 0.0
    """After every step, reference = ema x reference + (1 - ema) x policy; 0: fixed."""
    reset_every: CountOrZero = 0
    """Steps between resets of the reference to the policy; 0: never."""
    on_plateau: bool = False
    """Reset only if the reward of the last `reset_every` steps has not improved."""
    reset_optimizer: bool = False
    """Whether a reset also clears the moments of AdamW."""

    @property
    def moves(self) -> bool:
        """Whether the reference ever changes."""
        return self.ema > 0 or self.reset_every > 0

    @model_validator(mode="after")
    def _one_way_to_move(self) -> "ReferenceSection":
        if self.ema and self.reset_every:
            raise ValueError(
                f"reference.ema is {self.ema} and reference.reset_every is {self.reset_every}: a "
                "reference either averages the policy or is reset to it. Keep one."
            )
        for name in ("on_plateau", "reset_optimizer"):
            if getattr(self, name) and not self.reset_every:
                raise ValueError(
                    f"reference.{name} is true without reference.reset_every: it only affects "
                    "resets. Set reference.reset_every to a number of steps."
                )
        return self
