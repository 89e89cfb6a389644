"""Rewards of math problems: equality of numbers in any notation (0.5, 1/2 and 50% are equal).

math-verify can hang on a completion, so recipes should give `correct` a `timeout`, which runs it in
a subprocess.
"""

from collections.abc import Sequence
from typing import Any

from klinic.errors import MissingExtraError
from klinic.tasks.base import Completion, completion_text


def correct(
    completions: Sequence[Completion],
    answer: Sequence[str],
    **columns: Any,  # noqa: ARG001 - the signature of every reward function
) -> list[float]:
    """Return 1 if the boxed answer, or else the last number, equals the correct one."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise MissingExtraError(
            'this reward needs math-verify. Install it with: pip install "klinic[math]"'
        ) from error
    # the subprocess has a time limit, so the library needs none
    right = [parse(f"${number.replace(',', '')}$", parsing_timeout=None) for number in answer]
    parsed = [
        parse(completion_text(completion), parsing_timeout=None) for completion in completions
    ]
    return [
        float(verify(gold, guess, timeout_seconds=None))
        for gold, guess in zip(right, parsed, strict=True)
    ]


def boxed(
    completions: Sequence[Completion],
    **columns: Any,  # noqa: ARG001
) -> list[float]:
    """Return 1 if the completion has a boxed answer: a format reward, for a small weight."""
    return [float("\\boxed{" in completion_text(completion)) for completion in completions]
