"""The `warm_start` section: supervised training before the first step."""

from typing import Annotated

from klinic.recipe.section import Count, Section, Text, within


class WarmStartSection(Section):
    """Supervised training before the first step; its result becomes the reference."""

    steps: Count = 1000
    """Number of supervised updates."""
    batch_size: Count = 64
    """Examples per update."""
    learning_rate: Annotated[float, within("a negative one climbs the loss", low=0)] = 1e-3
    """Learning rate of AdamW."""
    path: Text | None = None
    """JSONL file with `prompt` and `completion`; null: the task's own examples."""
