"""The `sampling` section: how completions are drawn."""

from typing import Annotated

from klinic.recipe.section import Count, CountOrZero, Section, Text, within


class SamplingSection(Section):
    """The distribution that the policy samples from. Only these settings apply, no others."""

    temperature: Annotated[
        float, within("greedy completions are all equal, so no advantage remains", above=0)
    ] = 1.0
    """Logits are divided by it; log-probs are those of the divided logits."""
    top_p: Annotated[float, within("it is a share of the probability", above=0, high=1)] = 1.0
    """Keep the likeliest tokens up to this share; 1 is off."""
    top_k: CountOrZero = 0
    """Keep this many of the likeliest tokens; 0 is off."""
    min_p: Annotated[float, within("it is a share of the likeliest", low=0, below=1)] = 0.0
    """Drop tokens less likely than this share of the likeliest; 0 is off."""
    max_new_tokens: Count = 256
    """Longest completion, in tokens; all turns of the policy together."""
    reply: Text | None = None
    """`file.py:function` that answers the policy, as a tool would; null is one turn."""
