"""What an answer is worth.

Called as TRL calls reward functions: for chats, a completion is a list of messages.
"""

import re
from collections import Counter


def f1(completions, answer, **columns):
    """Return how well the words of an answer match the right one, between 0 and 1 (as SQuAD does).

    A sentence that holds the answer among other words is worth a part: the policy is shown the way.
    """
    return [
        _f1(_words(said(c)), _words(right)) for c, right in zip(completions, answer, strict=True)
    ]


def right(completions, answer, others, **columns):
    """Return 1 where the answer is among the words, and none of the other facts' is."""
    found = []
    for completion, correct, wrong in zip(completions, answer, others, strict=True):
        words = set(_words(said(completion)))
        found.append(float(correct.lower() in words and not words & {w.lower() for w in wrong}))
    return found


def exact(completions, answer, **columns):
    """Return 1 where the answer is the right word and nothing else."""
    return [
        float(_words(said(c)) == _words(right))
        for c, right in zip(completions, answer, strict=True)
    ]


def mentions(completions, answer, **columns):
    """Return 1 where the right answer is somewhere in what was said."""
    return [
        float(right.lower() in said(c).lower())
        for c, right in zip(completions, answer, strict=True)
    ]


def said(completion):
    """Return the text of the last turn."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _words(text):
    return [word for word in re.findall(r"\w+", text.lower()) if word not in {"a", "an", "the"}]


def _f1(found, right):
    common = sum((Counter(found) & Counter(right)).values())
    if not common:
        return 0.0
    precision, recall = common / len(found), common / len(right)
    return 2 * precision * recall / (precision + recall)
