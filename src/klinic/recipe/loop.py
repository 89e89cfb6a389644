"""The `loop` section: number of steps, batch size, evaluation and checkpoints."""

from typing import Annotated

from klinic.recipe.section import LARGEST_COUNT, Count, CountOrZero, Section, within


class LoopSection(Section):
    """Steps, batch size, and the intervals of evaluation and checkpoints."""

    max_steps: Count = 100
    """Number of training steps, counted from 1."""
    prompts_per_step: Count = 8
    """Prompts per step."""
    group_size: Annotated[
        int,
        within(
            "a group of one has zero advantage everywhere, so nothing is learned",
            low=2,
        ),
        within("it is a count", high=LARGEST_COUNT),
    ] = 8
    """Completions per prompt; advantages are computed within the group."""
    extra_rounds: CountOrZero = 0
    """Extra batches sampled while groups have equal rewards (dynamic sampling); 0: none."""
    eval_every: CountOrZero = 0
    """Steps between evaluations; 0: only at the end."""
    eval_prompts: Count = 200
    """Held-out prompts per skill in an evaluation."""
    checkpoint_every: CountOrZero = 50
    """Steps between checkpoints; 0: only at the end."""
    keep_checkpoints: Annotated[
        int,
        within("a damaged checkpoint needs a predecessor to fall back on", low=2),
        within("it is a count", high=LARGEST_COUNT),
    ] = 2
    """Number of most recent checkpoints to keep on disk."""
    show_completions_every: CountOrZero = 0
    """Steps between printing of sample completions with rewards; 0: never."""
