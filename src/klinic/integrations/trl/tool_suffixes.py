"""Separates a tool's text from the template's tokens around it, in what TRL appends to a row.

TRL renders the results of a turn's tool calls with the chat template and appends the tokens to the
completion. The same turn rendered with two other results shows which of them are the template's.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from klinic.evidence.record import EmittedBy

ToolMessage = Mapping[str, Any]
RenderSuffix = Callable[[Sequence[ToolMessage]], Sequence[int]]
STAND_INS = ("0", "1")  # results of one token each


class ToolSuffixes:
    """The token sequences that TRL appended in one generation, with the source of each token."""

    def __init__(self) -> None:
        self._emitters: dict[bytes, np.ndarray] = {}
        self._template_parts: dict[tuple[str, ...], list[np.ndarray] | None] = {}

    def clear(self) -> None:
        """Forget the sequences of an earlier generation."""
        self._emitters.clear()

    def record_suffix(self, real: RenderSuffix, messages: Sequence[ToolMessage]) -> Sequence[int]:
        """Return what TRL appends for the results of one turn, and record its sources."""
        suffix = real(messages)
        ids = np.asarray(suffix, np.int64)
        if ids.tobytes() not in self._emitters:
            names = tuple(str(message.get("name")) for message in messages)
            if names not in self._template_parts:
                self._template_parts[names] = _find_template_parts(real, messages)
            self._emitters[ids.tobytes()] = _label_tokens(ids, self._template_parts[names])
        return suffix

    def token_emitters(self, ids: np.ndarray, is_policy: np.ndarray) -> np.ndarray:
        """Return the source of each token of a completion, given those of the policy."""
        emitters = np.where(is_policy, EmittedBy.POLICY, EmittedBy.TOOL).astype(np.int8)
        bounds = [0, *(np.flatnonzero(np.diff(is_policy)) + 1).tolist(), len(ids)]
        for start, end in pairwise(bounds):
            labels = self._emitters.get(ids[start:end].tobytes())
            if labels is not None and start < end and not is_policy[start]:
                emitters[start:end] = labels
        return emitters


def _find_template_parts(
    real: RenderSuffix, messages: Sequence[ToolMessage]
) -> list[np.ndarray] | None:
    """Return the template's tokens before, between and after the results; None if unknown."""
    if not all(isinstance(message["content"], str) for message in messages):
        return None
    try:
        one, other = (
            np.asarray(real([{**message, "content": text} for message in messages]), np.int64)
            for text in STAND_INS
        )
    except Exception:  # a template that rejects the stand-ins must not end the training
        return None
    if len(one) != len(other):
        return None
    places = np.flatnonzero(one != other)
    if len(places) != len(messages):
        return None
    bounds = [-1, *places.tolist(), len(one)]
    return [one[at + 1 : end] for at, end in pairwise(bounds)]


def _label_tokens(ids: np.ndarray, parts: Sequence[np.ndarray] | None) -> np.ndarray:
    """Return the source of each token; all are the tool's where the parts are not found."""
    labels = np.full(len(ids), EmittedBy.TOOL, np.int8)
    if parts is None:
        return labels
    place = 0
    for number, part in enumerate(parts):
        if number == len(parts) - 1:
            start = len(ids) - len(part)
        else:
            start = 0 if number == 0 else _find(ids, part, place)
        if start < place or not np.array_equal(ids[start : start + len(part)], part):
            return np.full(len(ids), EmittedBy.TOOL, np.int8)
        labels[start : start + len(part)] = EmittedBy.TEMPLATE
        place = start + len(part)
    return labels


def _find(ids: np.ndarray, part: np.ndarray, start: int) -> int:
    """Return the first index of a sequence at or after `start`; -1 if there is none."""
    indices = range(start, len(ids) - len(part) + 1)
    return next((at for at in indices if np.array_equal(ids[at : at + len(part)], part)), -1)
