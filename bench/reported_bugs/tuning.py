"""Supervised training before a run, for threads that begin with a fine-tuned model."""

from collections.abc import Sequence
from typing import Any

import torch

BATCH = 64
Example = tuple[str, str]
"""A prompt, and what is to be learnt behind it. A token is a character, or `<|eos|>`."""


def fine_tune(
    model: Any, tokenizer: Any, examples: Sequence[Example], *, steps: int, rate: float
) -> None:
    """Train the weights that may be trained on examples, in their order."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate)
    for step in range(steps):
        batch = [examples[(step * BATCH + i) % len(examples)] for i in range(BATCH)]
        model(**_supervised(tokenizer, batch)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _supervised(tokenizer: Any, examples: Sequence[Example]) -> dict[str, torch.Tensor]:
    texts = [prompt + learnt for prompt, learnt in examples]
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for line, (prompt, _) in zip(labels, examples, strict=True):
        line[: len(tokenizer.encode(prompt))] = -100
    return {**batch, "labels": labels}
