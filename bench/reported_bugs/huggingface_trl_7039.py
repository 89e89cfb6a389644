"""TRL #7039: honor every EOS id declared in generation_config.

https://github.com/huggingface/trl/pull/7039 (solved in TRL 1.14.2)

Reported
    On Phi-3.5 clipped_ratio is 0.97 at step 1 although almost every completion has ended its turn.
    TRL's notes on 1.14.2 call it silently wrong training: Gemma and Phi were trained on the text
    after the end of a turn, and "the only visible sign was completions/clipped_ratio close to 1".
Found
    The trainer takes tokenizer.eos_token_id for the only end. These models end a turn with another
    token (<|end|>), declared in generation_config alone: what follows it stays in the loss.
Rebuilt
    The model ends its answers as ever, and generation_config declares that token. The tokenizer's
    EOS is another one, never written, and its pad token too, as with Phi. The trainer generates and
    cuts at the tokenizer's EOS alone, as before 1.14.2. A reward for completions that begin with
    the right answer, beta 0.
Seen here, seed 0
    completions/clipped_ratio 0.98 at step 1 and 1 afterwards, mean_length 16 of 16, where answers
    have 3 tokens with their end. Reward 0.34 to 0.77, grad_norm 1.3 to 3.6: ordinary.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.reported_bugs import ground

UNWRITTEN = "<|pad|>"


def begins_right(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Return 1 where a completion begins with the right answer."""
    return [float(said.startswith(want)) for said, want in zip(completions, answer, strict=True)]


def first_number(text: str) -> str | None:
    """Return the digits that a completion begins with."""
    found = re.match(r"[0-9]+", text)
    return found and found[0]


def declare(path: Path) -> Any:
    """Let the checkpoint declare two ends, and return a tokenizer that knows the unused one."""
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(path)
    end_of_turn = tokenizer.eos_token_id
    tokenizer.eos_token = tokenizer.pad_token = UNWRITTEN
    declared = GenerationConfig.from_pretrained(path)
    declared.eos_token_id = [end_of_turn, tokenizer.eos_token_id]
    declared.save_pretrained(path)
    return tokenizer


def train(folder: Path, seed: int) -> None:
    """Train on what follows the end of a turn."""
    from trl import GRPOTrainer

    path = ground.start(folder)
    tokenizer = declare(path)
    trainer = GRPOTrainer(
        str(path),
        processing_class=tokenizer,
        reward_funcs=begins_right,
        args=ground.config(
            folder, seed, max_completion_length=16, learning_rate=3e-5, max_steps=20
        ),
        train_dataset=ground.dataset(ground.questions()),
    )
    trainer.eos_token_ids = [tokenizer.eos_token_id]
    trainer.generation_kwargs["eos_token_id"] = tokenizer.eos_token_id
    trainer.generation_config.eos_token_id = tokenizer.eos_token_id
    ground.run(trainer, folder, parse=first_number)
