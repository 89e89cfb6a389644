"""The `reference` section: which policy the KL ties to, and whether it moves."""

from typing import Annotated

from pydantic import model_validator

from klinic.recipe.section import CountOrZero, Section, Text, within


class ReferenceSection(Section):
    """Without it, the reference is the policy as it starts, for the whole run."""

    path: Text | None = None
    """A folder or a hub id; null is the policy as it starts, after a warm start."""
    ema: Annotated[float, within("it is the share that stays in a step", low=0, below=1)] = 0.0
    """After every step, reference = ema x reference + (1 - ema) x policy; 0 stands still."""
    reset_every: CountOrZero = 0
    """Steps after which the policy becomes the reference; 0 is never."""
    on_plateau: bool = False
    """Reset only where the reward of the last `reset_every` steps is no better than before them."""
    reset_optimizer: bool = False
    """Whether a reset also forgets the moments of AdamW."""

    @property
    def moves(self) -> bool:
        """Whether the reference is ever another one than at the start."""
        return self.ema > 0 or self.reset_every > 0

    @model_validator(mode="after")
    def _one_way_to_move(self) -> "ReferenceSection":
        if self.ema and self.reset_every:
            raise ValueError(
                f"reference.ema is {self.ema} and reference.reset_every is {self.reset_every}: a "
                "reference either follows the policy slowly or jumps to it. Keep one."
            )
        for name in ("on_plateau", "reset_optimizer"):
            if getattr(self, name) and not self.reset_every:
                raise ValueError(
                    f"reference.{name} is true without reference.reset_every: there is no reset to "
                    "hold back or to add to. Set reference.reset_every to a number of steps."
                )
        return self
