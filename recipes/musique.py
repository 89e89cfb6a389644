"""MuSiQue: questions whose answer takes several paragraphs, as chats, judged by words in common."""

import re
from collections import Counter

INSTRUCTION = (
    "Answer the question from the documents. Think first, then write the answer alone between "
    "<answer> and </answer>."
)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.S)


def row(row):
    """Return a question with its documents as a chat; one without an answer is left out."""
    if not row.get("answerable", True):
        return None
    documents = "\n\n".join(
        f"# {paragraph['title']}\n{paragraph['paragraph_text']}" for paragraph in row["paragraphs"]
    )
    messages = [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": f"{documents}\n\nQuestion: {row['question']}"},
    ]
    return {"prompt": messages, "answers": [row["answer"], *(row.get("answer_aliases") or [])]}


def f1(completions, answers, **columns):
    """Return the words in common with the nearest right answer, between 0 and 1."""
    return [
        max(_f1(_words(answer_of(c)), _words(right)) for right in known)
        for c, known in zip(completions, answers, strict=True)
    ]


def exact(completions, answers, **columns):
    """Return 1 where the answer is one of the right ones."""
    return [
        float(any(_words(answer_of(c)) == _words(right) for right in known))
        for c, known in zip(completions, answers, strict=True)
    ]


def answer_of(completion):
    """Return what stands between the marks; nothing where there are none."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    found = ANSWER.findall(text)
    return found[-1] if found else ""


def _words(text):
    return [word for word in re.findall(r"\w+", text.lower()) if word not in {"a", "an", "the"}]


def _f1(found, right):
    common = sum((Counter(found) & Counter(right)).values())
    if not common:
        return 0.0
    precision, recall = common / len(found), common / len(right)
    return 2 * precision * recall / (precision + recall)
