"""A stand-in for vLLM inside TRL's trainer: weights of its own, drawn from by transformers.

TRL syncs weights into it, sends it prompts, and gets back completions with their log-probs, so the
trainer's own way with vLLM runs: the importance ratio, its cap, and what is logged of both.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Engine:
    """Weights in bfloat16, as they were when they were last written."""

    def __init__(self, trainer: Any, path: Path) -> None:
        self.trainer, self.path = trainer, path
        self.lm = self._from_disk()

    def _from_disk(self) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.bfloat16).eval()

    @torch.no_grad()
    def sync_weights(self) -> None:
        """Write the weights of the policy into the engine."""
        policy = dict(self.trainer.model.named_parameters())
        for name, weight in self.lm.named_parameters():
            weight.copy_(policy[name])

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, Any, Any, Any]:
        """Return prompts, completions, and log-probs and ids of the tokens that were drawn."""
        tokenizer = self.trainer.processing_class
        sent = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        out = self.lm.generate(
            **sent,
            generation_config=self.trainer.generation_config,
            return_dict_in_generate=True,
            output_scores=True,
        )
        drawn = out.sequences[:, sent["input_ids"].size(1) :]
        logp = torch.stack(out.scores, dim=1).float().log_softmax(-1)
        logp = logp.gather(2, drawn[:, :, None])[:, :, 0]
        ids = [_to_end(row, tokenizer.eos_token_id) for row in drawn]
        said = [
            [[float(value)] for value in logp[row, : len(kept)]] for row, kept in enumerate(ids)
        ]
        return prompts, ids, said, [[[token] for token in kept] for kept in ids]


def _to_end(row: Tensor, end: int) -> list[int]:
    """Return the tokens of a row up to its first end."""
    ids: list[int] = row.tolist()
    return ids[: ids.index(end) + 1] if end in ids else ids


def use(trainer: Any, engine: Engine) -> None:
    """Let a trainer draw from the engine, as with use_vllm and vllm_mode of colocate."""
    trainer.use_vllm = trainer.args.use_vllm = True
    trainer.vllm_mode = trainer.args.vllm_mode = "colocate"
    trainer._last_loaded_step = -1
    trainer.vllm_generation = engine
