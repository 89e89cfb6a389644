"""The `model` section: which policy is trained, and in which form."""

from typing import Literal

from pydantic import model_validator

from klinic.recipe.section import Count, Section, Text


class ModelSection(Section):
    """The policy."""

    name: Text
    """`tiny` or `tiny-gpt2` (built-in character models, no download), a folder, or a hub id."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """What matrices are multiplied in; weights, head and log-probs are fp32 either way."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run on this machine."""
    lora_rank: Count | None = None
    """Train a fresh adapter of this rank; null trains every weight, or the adapter `name` is."""
    lora_alpha: Count | None = None
    """Scale of the adapters; null is 2 x rank."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    compile: bool = False
    """Compile the model before training."""

    @model_validator(mode="after")
    def _adapters_have_a_rank(self) -> "ModelSection":
        if self.lora_alpha is not None and self.lora_rank is None:
            raise ValueError(
                f"model.lora_alpha is {self.lora_alpha} without model.lora_rank: there are no "
                "adapters to scale. Set model.lora_rank (16 is usual), or leave both out."
            )
        return self
