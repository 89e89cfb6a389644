"""Unsloth #5673: env_mask of a custom rollout_func is not applied.

https://github.com/unslothai/unsloth/issues/5673 (fixed by #5682 and unsloth-zoo #688)

Reported
    Multi-turn code repair with a rollout_func: "after some time, the training is collapsing - the
    reward falls down, model cant properly answer after 1st turn". GSPO and beta > 0 "kinda helped,
    but not much".
Found
    The patched trainer has a completion mask only: tokens of the environment's feedback are trained
    on as if the model had said them. With the mask applied "the training run finishes properly
    without issues or reward collapse".
Rebuilt
    A sum is asked; after a wrong answer the environment says so and asks again, and the second
    answer counts. The model was taught such conversations before. rollout_func returns env_mask,
    and the trainer loses it on the way from rollouts to the loss. No KL, and ratios by token: as
    the reporter began.
Seen here, seed 0
    Right in the end: 0.39 to 0.53 in steps 1 to 3, 0.23 to 0.33 in steps 27 to 30. Right second
    answers: 0.08 to 0.20 in steps 2 to 7, 0 to 0.07 from step 10 on. completions/clipped_ratio
    rises from 0 to 0.70, and the loss is 0.2 to 0.5 instead of about 0. (With GSPO and beta 0.04 at
    a third of the rate: no collapse within 40 steps, kl 1 to 2.)
"""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from bench.reported_bugs import ground
from bench.reported_bugs.tuning import fine_tune

TURN = 8  # tokens of an answer
FEEDBACK = ("\nno, again: {prompt}", "\nthat is wrong. {prompt}", "\ntry it once more: {prompt}")
SFT_STEPS = 200


def feedback(turn: int, prompt: str) -> str:
    """Return what the environment says to a wrong answer."""
    return FEEDBACK[turn % len(FEEDBACK)].format(prompt=prompt)


def last_answer(text: str) -> str:
    """Return what was said after the last question."""
    return text.rsplit("=", 1)[-1]


def repaired(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Return 1 where the last answer is right."""
    return ground.right([last_answer(text) for text in completions], answer)


def second_turn(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float | None]:
    """Return whether the second answer is right; None where there was no second turn."""
    right = repaired(completions, answer)
    return [mark if "=" in text else None for text, mark in zip(completions, right, strict=True)]


def parse(text: str) -> str | None:
    """Return the last answer."""
    return ground.parse(last_answer(text))


class Environment:
    """Asks again where an answer is wrong."""

    def __init__(self, rows: Sequence[dict[str, str]]) -> None:
        self.answers = {row["prompt"]: row["answer"] for row in rows}

    def rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Return two turns at most, with the environment's words between them."""
        tokenizer = trainer.processing_class
        prompt_ids = [tokenizer.encode(prompt) for prompt in prompts]
        ids, logp = draw(trainer, prompt_ids)
        mask = [[1] * len(row) for row in ids]
        said = tokenizer.batch_decode(ids, skip_special_tokens=True)
        again = [i for i, prompt in enumerate(prompts) if said[i] != self.answers[prompt]]
        for i in again:
            words = tokenizer.encode(feedback(i, prompts[i]))
            ids[i], mask[i] = ids[i] + words, mask[i] + [0] * len(words)
            logp[i] = logp[i] + [0.0] * len(words)
        second = draw(trainer, [prompt_ids[i] + ids[i] for i in again]) if again else ([], [])
        for i, row, values in zip(again, *second, strict=True):
            ids[i], logp[i], mask[i] = ids[i] + row, logp[i] + values, mask[i] + [1] * len(row)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": ids,
            "logprobs": logp,
            "env_mask": mask,
        }


@torch.no_grad()
def draw(trainer: Any, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
    """Return an answer to each prompt, with its log-probs."""
    tokenizer = trainer.processing_class
    sent = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    out = trainer.model.generate(
        **sent,
        generation_config=trainer.generation_config,
        max_new_tokens=TURN,
        return_dict_in_generate=True,
        output_scores=True,
    )
    drawn = out.sequences[:, sent["input_ids"].size(1) :]
    logp = torch.stack(out.scores, dim=1).log_softmax(-1).gather(2, drawn[:, :, None])[:, :, 0]
    ends = (drawn == tokenizer.eos_token_id).int()
    lengths = torch.where(ends.any(1), ends.argmax(1) + 1, drawn.size(1)).tolist()
    ids = [row[:length] for row, length in zip(drawn.tolist(), lengths, strict=True)]
    return ids, [row[:length] for row, length in zip(logp.tolist(), lengths, strict=True)]


def conversing(path: Path) -> None:
    """Teach the model conversations of two turns, as a chat model knows them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
    )
    end, random = tokenizer.eos_token, Random(0)  # noqa: S311 - draws examples, keeps no secrets
    examples = []
    for i, row in enumerate(ground.questions()):
        wrong = str(abs(int(row["answer"]) - random.choice((1, 2, 10, 10, 10))))
        second = row["answer"] if random.random() < 0.7 else wrong
        words = wrong + end + feedback(i, row["prompt"]) + second + end
        examples.append((row["prompt"], words if random.random() < 0.5 else row["answer"] + end))
    fine_tune(model, tokenizer, examples, steps=SFT_STEPS, rate=1e-3)
    model.save_pretrained(path)


def train(folder: Path, seed: int) -> None:
    """Train on the environment's words as on the model's own."""
    from trl import GRPOTrainer

    class CompletionMaskOnly(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs):  # type: ignore[no-untyped-def]
            batch = super()._generate_and_score_completions(inputs)
            del batch["tool_mask"]
            batch["num_items_in_batch"] = batch["completion_mask"].sum()
            return batch

    rows, path = ground.questions(), ground.start(folder)
    conversing(path)
    trainer = CompletionMaskOnly(
        str(path),
        reward_funcs=[repaired, second_turn],
        args=ground.config(
            folder,
            seed,
            reward_weights=[1.0, 0.0],
            max_completion_length=64,
            learning_rate=3e-4,
            max_steps=30,
        ),
        train_dataset=ground.dataset(rows),
        rollout_func=Environment(rows).rollout,
    )
    ground.run(trainer, folder, parse=parse)
