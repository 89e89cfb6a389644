"""Whether a number is right, whatever way it is written: 0.5, 1/2 and 50% are one.

math-verify parses what a model wrote, which can take for ever: a recipe gives `correct` a
`timeout`, and with it a process of its own.
"""

from collections.abc import Sequence
from typing import Any

from klinic.errors import MissingExtraError
from klinic.tasks.said import Completion, said


def correct(
    completions: Sequence[Completion],
    answer: Sequence[str],
    **columns: Any,  # noqa: ARG001 - the signature of every reward function
) -> list[float]:
    """Return 1 where the boxed answer, or the last number, equals the right one."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise MissingExtraError(
            'this reward needs math-verify. Install it with: pip install "klinic[math]"'
        ) from error
    # the process has a time limit of its own, so the library needs none
    right = [parse(f"${number.replace(',', '')}$", parsing_timeout=None) for number in answer]
    found = [parse(said(completion), parsing_timeout=None) for completion in completions]
    return [
        float(verify(gold, guess, timeout_seconds=None))
        for gold, guess in zip(right, found, strict=True)
    ]


def boxed(
    completions: Sequence[Completion],
    **columns: Any,  # noqa: ARG001
) -> list[float]:
    """Return 1 where an answer is boxed at all: the format, worth little beside the answer."""
    return [float("\\boxed{" in said(completion)) for completion in completions]
