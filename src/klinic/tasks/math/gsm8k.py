"""Rows of GSM8K's form (question, worked answer) as chats.

For a recipe: `data.map: klinic.tasks.math.gsm8k:row`.
"""

from collections.abc import Mapping
from typing import Any

INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."
BEHIND = "####"  # what the number stands behind in a worked answer


def row(example: Mapping[str, Any]) -> dict[str, Any]:
    """Return a question as a chat, with the number behind its worked solution."""
    messages = [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": example["question"]},
    ]
    return {"prompt": messages, "answer": example["answer"].rpartition(BEHIND)[2].strip()}
