"""The `model` section: the policy, its dtype and LoRA."""

from typing import Literal

from pydantic import model_validator

from klinic.recipe.section import Count, Section, Text


class ModelSection(Section):
    """The policy to train."""

    name: Text
    """`tiny` or `tiny-gpt2` (built-in character models, no download), a folder, or a hub id."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of matrix products; weights, head and log-probs are always fp32."""
    trust_remote_code: bool = False
    """Whether to run Python code that comes with the model."""
    lora_rank: Count | None = None
    """Rank of a new LoRA adapter; null trains all weights, or the adapter in `name`."""
    lora_alpha: Count | None = None
    """LoRA alpha; null: 2 x rank."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    compile: bool = False
    """Compile the model with torch.compile."""

    @model_validator(mode="after")
    def _adapters_have_a_rank(self) -> "ModelSection":
        if self.lora_alpha is not None and self.lora_rank is None:
            raise ValueError(
                f"model.lora_alpha is {self.lora_alpha} without model.lora_rank: there are no "
                "adapters to scale. Set model.lora_rank (16 is usual), or remove model.lora_alpha."
            )
        return self
