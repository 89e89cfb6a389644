"""Final answers of texts: the marked ones, and whether they equal an answer of a dataset."""

import re

ANSWER_COLUMNS = (
    *("answer", "solution", "ground_truth", "gold", "target", "label", "expected"),
    *("final_answer", "gold_answer", "correct_answer", "reference_answer", "golden_answer"),
)
"""Names of columns with the answer of a dataset."""
# no answer holds another start, so that many starts without an end are read in one pass
FINAL_ANSWER = re.compile(
    r"\\boxed\{([^{}]*)\}|<answer>((?:(?!<answer>).)*?)</answer>|####\s*([^\n]+)", re.DOTALL
)
AROUND = " \t\r\n$.,"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def final_answers(text: str) -> frozenset[str]:
    r"""Return the whole text and its last marked answer, without white space around them.

    >>> sorted(final_answers(" 42\n")), sorted(final_answers("so \\boxed{7}"))
    (['42'], ['7', 'so \\boxed{7}'])
    """
    return frozenset(part.strip().casefold() for part in (text, _last_marked(text))) - {""}


def marked_number(text: str) -> float | None:
    r"""Return the last marked answer of a completion if it is a number.

    >>> marked_number("<answer> 1,200 </answer>"), marked_number("so \\boxed{x}")
    (1200.0, None)
    >>> marked_number("<answer>" * 20_000 + "7</answer>")
    7.0
    """
    return _number(_last_marked(text))


def dataset_number(answer: str) -> float | None:
    r"""Return the answer of a dataset if it is a number, marked or not.

    >>> dataset_number("$7$"), dataset_number("2 + 5 = 7\n#### 7"), dataset_number("see above")
    (7.0, 7.0, None)
    """
    number = marked_number(answer)
    return _number(answer) if number is None else number


def _last_marked(text: str) -> str:
    """Return the last marked answer; "" without one."""
    marked = FINAL_ANSWER.findall(text)
    return "".join(marked[-1]) if marked else ""


def _number(text: str) -> float | None:
    plain = text.strip(AROUND).replace(",", "")
    return float(plain) if NUMBER.fullmatch(plain) else None
