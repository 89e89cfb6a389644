"""TRL #3194: GRPO with a LoRA model that was fine-tuned before, as policy and as reference.

https://github.com/huggingface/trl/issues/3194 (solved by #4723)

Reported
    A LoRA model that already has fine-tuned weights is trained on: "the reference model will use
    the base model and not the SFT LoRA weight leading to divergence since there is an inherent and
    dubious KL divergence".
Found
    Reference log-probs are computed with the adapter disabled, which "is only correct when the
    adapter is newly initialized". Since #4723 a frozen copy of the adapter is the reference.
Rebuilt
    An adapter is fine-tuned on right sums, and given to the trainer as a PeftModel. The copy that
    TRL 1.16 makes of it is deleted, so the reference is the base model, as it was. beta 0.04.
Seen here, seed 0
    kl is 0.29 at step 1, before anything was learnt (0 with the copy of the adapter), and 0.05 to
    0.9 afterwards. Right answers 0.81 at step 1, 0.66 to 0.97 afterwards.
"""

from pathlib import Path
from typing import Any

import torch

from bench.reported_bugs import ground
from bench.reported_bugs.tuning import fine_tune

SFT_STEPS = 150


def fine_tuned(path: Path, tokenizer: Any) -> Any:
    """Return the model with an adapter that was trained on right answers."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(path),
        LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    examples = [(row["prompt"], row["answer"] + tokenizer.eos_token) for row in ground.questions()]
    fine_tune(model, tokenizer, examples, steps=SFT_STEPS, rate=3e-3)
    return model


def train(folder: Path, seed: int) -> None:
    """Train an adapter further, with the base model as reference."""
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    path = ground.start(folder)
    tokenizer = AutoTokenizer.from_pretrained(path)
    trainer = GRPOTrainer(
        fine_tuned(path, tokenizer),
        reward_funcs=ground.right,
        args=ground.config(
            folder,
            seed,
            beta=0.04,
            use_bias_correction_kl=False,
            loss_type="grpo",
            learning_rate=3e-4,
            max_steps=20,
        ),
        processing_class=tokenizer,
        train_dataset=ground.dataset(ground.questions()),
    )
    trainer.model.delete_adapter("ref")
    ground.run(trainer, folder)
