"""Per-token weights of TRL's losses.

    loss_type            weight of a trained token
    grpo, sapo           1 / (tokens of its row * rows * accumulation steps)
    bnpo                 1 / (tokens of the micro-batch * accumulation steps)
    dr_grpo              1 / (rows * max_completion_length * accumulation steps)
    luspo                1 / (rows * accumulation steps)
    dapo, cispo, vespo   1 / (tokens of the generation * accumulation steps / steps_per_generation)

Source: `GRPOTrainer._compute_loss` of TRL 1.16; tests compare both.
"""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from klinic.integrations.trl.scoring import Batch, trained_on

GLOBAL = ("dapo", "cispo", "vespo")
KNOWN = ("grpo", "sapo", "bnpo", "dr_grpo", "luspo", *GLOBAL)


def token_weights(trainer: Any, batch: Batch, dtype: Any) -> Float[Tensor, "rows length"]:
    """Return the weights of a micro-batch, 0 outside the mask."""
    mask: Tensor = trained_on(batch).to(dtype)
    rows, training = mask.size(0), trainer.model.training
    parts = float(trainer.current_gradient_accumulation_steps) if training else 1.0
    match trainer.loss_type:
        case "grpo" | "sapo":
            return mask / mask.sum(-1, keepdim=True).clamp(min=1.0) / rows / parts
        case "bnpo":
            return mask / mask.sum().clamp(min=1.0) / parts
        case "dr_grpo":
            return mask / (rows * int(trainer.max_completion_length)) / parts
        case "luspo":
            return mask / rows / parts
    share = parts / trainer.args.steps_per_generation if training else 1.0
    tokens: Tensor = batch["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
    return mask / (tokens * share)
