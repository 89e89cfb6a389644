"""The `sampler` section: what draws the completions."""

from typing import Literal

from klinic.recipe.section import Section, Text


class SamplerSection(Section):
    """The engine. What it draws from is the `sampling` section's, whichever it is."""

    type: Literal["transformers", "vllm"] = "transformers"
    """`transformers` is this process, with the weights that are trained; `vllm` is an engine."""
    server: Text | None = None
    """URL of a running vLLM server; null starts an engine for the run."""
