"""Extracts answers from tags, normalises them, and compares them by words.

The normalisation is that of SQuAD, as in MuSiQue's own evaluation: lower case, no punctuation, no
articles, single spaces.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.S)
ARTICLES = frozenset({"a", "an", "the"})
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def extract_answer(text: str) -> str | None:
    """Return the text between the answer tags, or None unless there is exactly one pair.

    Two answers count as none, so that guessing twice gains nothing.

    >>> extract_answer("so it is <answer>Peru</answer>")
    'Peru'
    """
    matches: list[str] = ANSWER.findall(text)
    return matches[0].strip() if len(matches) == 1 else None


def normalized_words(text: str) -> list[str]:
    """Return the normalised words of an answer.

    >>> normalized_words("The U.S. Army's  band")
    ['us', 'armys', 'band']
    """
    plain = text.lower().translate(NO_PUNCTUATION)
    return [word for word in plain.split() if word not in ARTICLES]


def is_exact(answer: str, accepted: Sequence[str]) -> bool:
    """Return whether an answer equals one of the correct ones after normalisation."""
    return any(normalized_words(answer) == normalized_words(right) for right in accepted)


def f1(answer: str, accepted: Sequence[str]) -> float:
    """Return the word F1 with the closest correct answer, from 0 to 1.

    >>> f1("in the Peru", ["Peru", "republic of peru"])
    0.6666666666666666
    """
    return max(_word_f1(normalized_words(answer), normalized_words(right)) for right in accepted)


def _word_f1(answer: Sequence[str], right: Sequence[str]) -> float:
    if not answer or not right:
        return float(answer == right)
    common = sum((Counter(answer) & Counter(right)).values())
    if not common:
        return 0.0
    precision, recall = common / len(answer), common / len(right)
    return 2 * precision * recall / (precision + recall)
