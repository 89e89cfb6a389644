"""Evaluates TRL's own KL expression by running TRL's loss.

TRL has no KL function: the expression is inside `GRPOTrainer._compute_loss`. So a real trainer is
built around a model of a few hundred parameters, with its log-probs replaced by the arguments. With
advantages of 0 and beta of 1 its loss is the mean of its KL term.
"""

import tempfile
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def mean_kl(
    *,
    logp: Float[Tensor, "rows length"],
    logp_ref: Float[Tensor, "rows length"],
    logp_old: Float[Tensor, "rows length"] | None = None,
    bias_correction: bool = True,
) -> Float[Tensor, ""]:
    """Return the mean KL term of TRL's GRPO loss, with its gradient in `logp`.

    `bias_correction` is TRL's `use_bias_correction_kl`: k3 times the ratio to `logp_old`.
    """
    trainer = _build_trainer(bias_correction)
    trainer.logp = logp
    ids = torch.zeros(logp.shape, dtype=torch.int64)
    mask = torch.ones_like(ids)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.zeros(len(logp), dtype=logp.dtype),
        "ref_per_token_logps": logp_ref,
    }
    if logp_old is not None:
        inputs["old_per_token_logps"] = logp_old
    loss: Tensor = trainer._compute_loss(trainer.model, inputs)
    return loss


@cache
def _build_trainer(bias_correction: bool) -> Any:
    """Return a GRPO trainer with replaceable log-probs."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class FixedLogProbsTrainer(GRPOTrainer):  # type: ignore[misc]
        """TRL's trainer with its forward pass replaced by fixed log-probs."""

        logp: Tensor

        def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Any, Any, None]:
            return self.logp, torch.zeros_like(self.logp).detach(), None

    with tempfile.TemporaryDirectory() as folder:
        trainer = FixedLogProbsTrainer(
            model=_tiny_model(),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=folder,
                report_to="none",
                beta=0.0,  # above 0, TRL would load a reference model from a path
                loss_type="bnpo",  # the mean over all tokens
                use_bias_correction_kl=bias_correction,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["a"]}),
            processing_class=_tiny_tokenizer(),
        )
    trainer.beta = 1.0
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def _tiny_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4,
            hidden_size=4,
            intermediate_size=4,
            num_hidden_layers=1,
            num_attention_heads=1,
            pad_token_id=0,
            eos_token_id=3,
        )
    )


def _tiny_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "a": 1, "b": 2, "<eos>": 3}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="a")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
