"""Copies of completions that independent samples cannot be, found without any log-prob.

Token ids or the characters of a text are compared: a dump of texts decides it too.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from klinic.checks.base import Case
from klinic.evidence.record import StepRecord

MIN_GROUP = 3  # completions of a prompt
MIN_SHARED = 3  # different completions that another prompt has too, all of its group
MIN_LENGTH = 20  # tokens or characters, on average: short answers are equal by chance
MIN_COPIED_GROUPS = 8  # groups of copies alone, in the recent steps
MIN_COPIED_FRACTION = 0.95  # of the groups
MIN_REPEATED_PROMPTS = 3  # prompts that come again, with another completion
MIN_OTHER_FRACTION = 0.5  # of the prompts that come again: a deterministic policy repeats itself
MAX_LOG_CHANCE = -20.0  # of two places that are equal in every group
MIN_GROUPS_OF_PAIRS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTexts:
    """Digests of the completions of one group of a step, in the order of their samples."""

    prompt: bytes | None
    completions: tuple[bytes, ...]
    length: float
    """Mean number of tokens."""

    @property
    def is_copied(self) -> bool:
        """Whether every completion is the first one."""
        return len(set(self.completions)) == 1


def find_copies(case: Case) -> str:
    """Return which completions of the recent steps are copies; "" if none must be."""
    measured = [case.measure_once(_measure_step, record) for record in case.recent_records]
    generations = {step.generation: step.groups for step in measured}
    groups = [group for step in generations.values() for group in step]
    return (
        _shared_between_prompts(groups)
        or _copied_groups(groups, case.recent_records)
        or _equal_places(groups)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    generation: bytes
    """Digest of prompts and tokens: updates on one generation record the same ones again."""
    groups: list[GroupTexts]


def _measure_step(record: StepRecord) -> _Step:
    """Return the groups of a step that have enough completions."""
    rows_by_group: dict[int, list[int]] = defaultdict(list)
    order = np.arange(record.num_rows) if record.sample is None else np.argsort(record.sample)
    for row in order.tolist():
        rows_by_group[int(record.group[row])].append(row)
    spans = list(pairwise(record.row_offsets.tolist()))
    texts = [_digest(record.token_ids[start:end]) for start, end in spans]
    groups = [
        GroupTexts(
            prompt=_prompt(record, rows[0]),
            completions=tuple(texts[row] for row in rows),
            length=float(np.mean([spans[row][1] - spans[row][0] for row in rows])),
        )
        for rows in rows_by_group.values()
        if len(rows) >= MIN_GROUP
    ]
    prompts = [group.prompt or b"" for group in groups]
    return _Step(generation=_digest(record.token_ids) + b"".join(prompts), groups=groups)


def _digest(ids: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(ids).data, digest_size=16).digest()


def _prompt(record: StepRecord, row: int) -> bytes | None:
    if record.prompt_ids is None or record.prompt_offsets is None:
        return None
    start, end = record.prompt_offsets[row : row + 2]
    return _digest(record.prompt_ids[start:end])


def _shared_between_prompts(groups: Sequence[GroupTexts]) -> str:
    """Return a message if different prompts have the same several different completions."""
    prompts: dict[tuple[bytes, ...], set[bytes]] = defaultdict(set)
    for group in groups:
        if group.prompt is not None and group.length >= MIN_LENGTH:
            prompts[tuple(sorted(group.completions))].add(group.prompt)
    shared = {
        texts: found
        for texts, found in prompts.items()
        if len(found) > 1 and len(set(texts)) >= MIN_SHARED
    }
    if not shared:
        return ""
    num = sum(len(found) for found in shared.values())
    return (
        f"{num} different prompts have the same completions as another, all of their group and "
        f"{MIN_SHARED} or more of them different (limit 0): they are copies"
    )


def _copied_groups(groups: Sequence[GroupTexts], records: Sequence[StepRecord]) -> str:
    """Return a message if nearly every group is one completion, of a policy that has others."""
    long = [group for group in groups if group.length >= MIN_LENGTH]
    copied = [group for group in long if group.is_copied]
    if len(copied) < MIN_COPIED_GROUPS or len(copied) < MIN_COPIED_FRACTION * len(long):
        return ""
    again, others = _count_repeated_prompts(copied)
    has_others = again >= MIN_REPEATED_PROMPTS and others >= MIN_OTHER_FRACTION * again
    if not has_others and _is_solved(records):
        return ""
    message = f"all completions are equal in {len(copied)} of {len(long)} groups (limit "
    message += f"{MIN_COPIED_FRACTION:.0%})"
    if has_others:
        return f"{message}, and {others} of {again} prompts that come again have another one"
    return message if min(record.step for record in records) <= 1 else ""


def _count_repeated_prompts(groups: Sequence[GroupTexts]) -> tuple[int, int]:
    """Return how many prompts come again, and how many of them with another completion."""
    completions: dict[bytes, list[bytes]] = defaultdict(list)
    for group in groups:
        if group.prompt is not None:
            completions[group.prompt].append(group.completions[0])
    again = [texts for texts in completions.values() if len(texts) > 1]
    return len(again), sum(len(set(texts)) > 1 for texts in again)


def _is_solved(records: Sequence[StepRecord]) -> bool:
    """Return whether rewards are unknown or nearly all the highest: copies may then be right."""
    rewards = [np.asarray(r.reward, np.float64) for r in records if r.reward is not None]
    reward = np.concatenate([*rewards, np.zeros(0)])
    reward = reward[np.isfinite(reward)]
    return not reward.size or float((reward == reward.max()).mean()) >= MIN_COPIED_FRACTION


def _equal_places(groups: Sequence[GroupTexts]) -> str:
    """Return a message if two places of a group are equal in every group, and others are not.

    The chance in a group is the fraction of its pairs that are equal.
    """
    sizes = {len(group.completions) for group in groups}
    if len(groups) < MIN_GROUPS_OF_PAIRS or len(sizes) > 1:
        return ""
    pairs = list(combinations(range(sizes.pop()), 2))
    log_chance = sum(np.log(_equal_fraction(group)) for group in groups)
    if log_chance + np.log(len(pairs)) > MAX_LOG_CHANCE:
        return ""
    equal = next(_always_equal(groups, pairs), None)
    if equal is None:
        return ""
    return (
        f"completions {equal[0]} and {equal[1]} of their group are equal in all {len(groups)} "
        f"groups, of which the other pairs have a chance of e^{log_chance:.0f}"
    )


def _equal_fraction(group: GroupTexts) -> float:
    counts = np.array([group.completions.count(text) for text in set(group.completions)])
    num = len(group.completions)
    equal = float((counts * (counts - 1)).sum()) / 2
    return max(equal, 1.0) / (num * (num - 1) / 2)


def _always_equal(
    groups: Sequence[GroupTexts], pairs: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    for one, other in pairs:
        if all(group.completions[one] == group.completions[other] for group in groups):
            yield one, other
