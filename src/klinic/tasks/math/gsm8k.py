"""Converts GSM8K rows (question, worked answer) to chat prompts.

For a recipe: `data.map: klinic.tasks.math.gsm8k:row`.
"""

from collections.abc import Mapping
from typing import Any

INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."
ANSWER_MARK = "####"  # precedes the final number in a worked answer


def row(example: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row: the question as a chat, and the final number as the answer."""
    messages = [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": example["question"]},
    ]
    return {"prompt": messages, "answer": example["answer"].rpartition(ANSWER_MARK)[2].strip()}
