"""Converts MuSiQue rows (question, paragraphs, answer, aliases) to prompts.

For a recipe: `data.map: klinic.tasks.multihop.musique:row`. A long context is truncated by whole
paragraphs. The row records the fraction of supporting paragraphs that remain; the reward
`context_kept`, with weight 0, makes it a metric.
"""

from collections.abc import Mapping, Sequence
from typing import Any

INSTRUCTION = (
    "Answer the question from the documents. Think first, then write the answer alone between "
    "<answer> and </answer>."
)
LONGEST = 24_000  # characters of all paragraphs, some 6,000 tokens


def row(example: Mapping[str, Any]) -> dict[str, Any] | None:
    """Convert a row to a chat with documents and question; None if it is unanswerable."""
    if not example.get("answerable", True):
        return None
    kept = within(example["paragraphs"], LONGEST)
    documents = "\n\n".join(f"# {p['title']}\n{p['paragraph_text']}" for p in kept)
    messages = [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": f"{documents}\n\nQuestion: {example['question']}"},
    ]
    return {
        "prompt": messages,
        "answers": right_answers(example),
        "context": supported(example["paragraphs"], kept),
    }


def right_answers(example: Mapping[str, Any]) -> list[str]:
    """Return the answer and all its aliases."""
    return [example["answer"], *(example.get("answer_aliases") or [])]


def within(paragraphs: Sequence[Mapping[str, Any]], longest: int) -> list[Mapping[str, Any]]:
    """Return the leading paragraphs that fit into `longest` characters."""
    kept, left = [], longest
    for paragraph in paragraphs:
        left -= len(paragraph["title"]) + len(paragraph["paragraph_text"])
        if left < 0:
            break
        kept.append(paragraph)
    return kept


def supported(paragraphs: Sequence[Mapping[str, Any]], kept: Sequence[Mapping[str, Any]]) -> float:
    """Return the fraction of supporting paragraphs that were kept (of all if none is marked).

    >>> marked = [{"title": "a", "is_supporting": True}, {"title": "b", "is_supporting": True}]
    >>> supported(marked, marked[:1])
    0.5
    """
    needed = [p for p in paragraphs if p.get("is_supporting")] or list(paragraphs)
    return sum(any(p is k for k in kept) for p in needed) / len(needed) if needed else 1.0
