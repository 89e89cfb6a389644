"""The `warm_start` section: supervised training first. Without it there is none."""

from typing import Annotated

from klinic.recipe.section import Count, Section, Text, within


class WarmStartSection(Section):
    """Supervised training before the first step; its result is the reference."""

    steps: Count = 1000
    """Supervised updates."""
    batch_size: Count = 64
    """Examples in an update."""
    learning_rate: Annotated[float, within("a negative one climbs the loss", low=0)] = 1e-3
    """Step size of AdamW."""
    path: Text | None = None
    """JSONL with `prompt` and `completion`; null is the task's own examples."""
