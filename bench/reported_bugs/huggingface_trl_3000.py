"""TRL #3000: the model remains in train mode while it samples.

https://github.com/huggingface/trl/issues/3000 (by the reporter of #2937 and #2970)

Reported
    "I've observed significant performance differences between train and eval modes. Output in eval
    mode is much better." For the same batch, trainer.predict() does far better than training.
Found
    By intention the flag is left alone during rollouts. A maintainer: where dropout is 0 this is a
    no-op, so a large gap comes from "a non-zero dropout in your model config" (set it to 0, or
    disable_dropout), "not from a missing .eval() call". Closed as not a bug.
Rebuilt
    The checkpoint's config.json has attention_dropout 0.02 (a tiny model bears little of it).
    Nothing else is changed: TRL samples and scores in train mode, and evaluates in eval mode. The
    thread names no settings; they are TRL's defaults. The same 32 questions are trained on and
    evaluated.
Seen here, seed 0
    Right answers while training: 0.55 on average of steps 1 to 10, 0.60 of 11 to 20. The same
    questions in evaluation: 0.76 at step 10, 0.79 at step 20. Scored again, with other
    units dropped, 24% of the tokens are off by over 10% from what the sampler said of them.
"""

import json
from pathlib import Path

from bench.reported_bugs import ground

DROPOUT = 0.02


def train(folder: Path, seed: int) -> None:
    """Train a model with dropout, and evaluate it without."""
    from trl import GRPOTrainer

    path = ground.start(folder)
    written = path / "config.json"
    kept = json.loads(written.read_text(encoding="utf-8"))
    written.write_text(json.dumps({**kept, "attention_dropout": DROPOUT}), encoding="utf-8")
    rows = ground.dataset(ground.questions()[:32])
    trainer = GRPOTrainer(
        str(path),
        reward_funcs=ground.right,
        args=ground.config(
            folder,
            seed,
            learning_rate=3e-5,
            max_steps=20,
            eval_strategy="steps",
            eval_steps=10,
            per_device_eval_batch_size=64,
        ),
        train_dataset=rows,
        eval_dataset=rows,
    )
    ground.run(trainer, folder, accuracy="right")
