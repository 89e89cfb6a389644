"""The `sampler` section: the engine that samples completions."""

from typing import Literal

from klinic.recipe.section import Section, Text


class SamplerSection(Section):
    """The engine. The `sampling` section sets the distribution for all engines."""

    type: Literal["transformers", "vllm"] = "transformers"
    """`transformers` samples in this process with the trained weights; `vllm` in a vLLM engine."""
    server: Text | None = None
    """URL of a running vLLM server; null starts an engine for the run."""
