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
    paragraphs = leading_paragraphs(example["paragraphs"], LONGEST)
    documents = "\n\n".join(f"# {p['title']}\n{p['paragraph_text']}" for p in paragraphs)
    messages = [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": f"{documents}\n\nQuestion: {example['question']}"},
    ]
    return {
        "prompt": messages,
        "answers": right_answers(example),
        "context": supporting_fraction(example["paragraphs"], paragraphs),
    }


def right_answers(example: Mapping[str, Any]) -> list[str]:
    """Return the answer and all its aliases."""
    return [example["answer"], *(example.get("answer_aliases") or [])]


def leading_paragraphs(
    paragraphs: Sequence[Mapping[str, Any]], longest: int
) -> list[Mapping[str, Any]]:
    """Return the leading paragraphs that fit into `longest` characters."""
    paragraphs_kept, left = [], longest
    for paragraph in paragraphs:
        left -= len(paragraph["title"]) + len(paragraph["paragraph_text"])
        if left < 0:
            break
        paragraphs_kept.append(paragraph)
    return paragraphs_kept


def supporting_fraction(
    paragraphs: Sequence[Mapping[str, Any]], paragraphs_kept: Sequence[Mapping[str, Any]]
) -> float:
    """Return the fraction of supporting paragraphs that were kept (of all if none is marked).

    >>> marked = [{"title": "a", "is_supporting": True}, {"title": "b", "is_supporting": True}]
    >>> supporting_fraction(marked, marked[:1])
    0.5
    """
    needed = [p for p in paragraphs if p.get("is_supporting")] or list(paragraphs)
    return (
        sum(any(p is k for k in paragraphs_kept) for p in needed) / len(needed) if needed else 1.0
    )
