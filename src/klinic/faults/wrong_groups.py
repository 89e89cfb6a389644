"""wrong-groups: rewards are grouped by position, half a group too early.

Second mechanism: rewards are ordered by prompt, and are grouped as if ordered by sample.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.training import run


@contextmanager
def shift_group_boundaries(severity: Severity) -> Iterator[None]:
    """Compare rewards across group boundaries: of all groups, or of the first two."""

    def with_shifted_groups(real: Any, record: Any, scores: Any, **options: Any) -> Any:
        group = np.array(record.group)
        size = int((group == group[0]).sum())
        end = len(group) if severity is Severity.NORMAL else 2 * size
        group[:end] = np.roll(group[:end], size // 2)
        regrouped = real(replace(record, group=group), scores, **options)
        return replace(regrouped, group=record.group)

    with patch_attribute(run, "with_rewards", with_shifted_groups):
        yield


FAULT = Fault(
    cause="wrong-groups",
    mechanism="groups start half a group too early",
    inject=shift_group_boundaries,
    visible_at_start=True,
)


# prompts of a step that are affected
NUM_MIXED_PROMPTS = {
    Severity.MILD: 2,
    Severity.NORMAL: 1_000_000,
}


@contextmanager
def interleave_groups(severity: Severity) -> Iterator[None]:
    """Compare each reward with one of every other prompt."""

    def with_interleaved_groups(real: Any, record: Any, scores: Any, **options: Any) -> Any:
        group = np.array(record.group)
        mixed = np.flatnonzero(group < NUM_MIXED_PROMPTS[severity])
        group[mixed] = np.arange(len(mixed)) % len(np.unique(group[mixed]))
        regrouped = real(replace(record, group=group), scores, **options)
        return replace(regrouped, group=record.group)

    with patch_attribute(run, "with_rewards", with_interleaved_groups):
        yield


SECOND_FAULT = Fault(
    cause="wrong-groups",
    mechanism="groups are formed along the wrong axis",
    inject=interleave_groups,
    visible_at_start=True,
)
