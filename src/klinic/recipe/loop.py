"""The `loop` section: how many steps, over how much, and what is kept on the way."""

from typing import Annotated

from klinic.recipe.section import LARGEST_COUNT, Count, CountOrZero, Section, within


class LoopSection(Section):
    """One step samples a group of completions for each prompt and updates the policy."""

    max_steps: Count = 100
    """Updates to make. Steps are counted from 1."""
    prompts_per_step: Count = 8
    """Prompts in a step."""
    group_size: Annotated[
        int,
        within(
            "a group of one has zero advantage everywhere, so nothing would be learnt",
            low=2,
        ),
        within("it is a count", high=LARGEST_COUNT),
    ] = 8
    """Completions of each prompt, compared with one another."""
    extra_rounds: CountOrZero = 0
    """Further batches to sample while groups have equal rewards (dynamic sampling); 0 is none."""
    eval_every: CountOrZero = 0
    """Steps between evaluations; 0 is only at the end."""
    eval_prompts: Count = 200
    """Held-out prompts of an evaluation, for each skill."""
    checkpoint_every: CountOrZero = 50
    """Steps between checkpoints; 0 is only at the end."""
    keep_checkpoints: Annotated[
        int,
        within("a checkpoint that turns out broken needs a predecessor", low=2),
        within("it is a count", high=LARGEST_COUNT),
    ] = 2
    """How many of the newest checkpoints stay on disk."""
    show_completions_every: CountOrZero = 0
    """Steps between printed samples, text beside reward; 0 is never."""
