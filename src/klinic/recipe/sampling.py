"""The `sampling` section: sampling parameters."""

from typing import Annotated

from klinic.recipe.section import Count, CountOrZero, Section, Text, within


class SamplingSection(Section):
    """Sampling parameters. A model's own generation config is ignored."""

    temperature: Annotated[
        float, within("greedy completions are all equal, so no advantage remains", above=0)
    ] = 1.0
    """Divisor of the logits; log-probs are computed from the divided logits."""
    top_p: Annotated[float, within("it is a cumulative probability", above=0, high=1)] = 1.0
    """Keep the likeliest tokens up to this cumulative probability; 1: off."""
    top_k: CountOrZero = 0
    """Keep this many of the likeliest tokens; 0: off."""
    min_p: Annotated[float, within("it is a fraction of the top probability", low=0, below=1)] = 0.0
    """Drop tokens with less than this fraction of the top token's probability; 0: off."""
    max_new_tokens: Count = 256
    """Maximum tokens of a completion, over all turns of the policy."""
    reply: Text | None = None
    """`file.py:function` that returns the environment's reply; null: single-turn."""
