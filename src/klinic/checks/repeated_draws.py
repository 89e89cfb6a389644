"""Generations that draw the same random numbers: completions return to their place in the group.

Samples of one prompt are exchangeable, whatever the policy: in a later generation the completion of
a place equals that of the same place as often as that of any other. A seed that is set anew in
every step makes it equal more often, as long as the policy moves little. No log-prob is needed.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from klinic.checks.base import Case
from klinic.checks.measures import prompts_of_rows
from klinic.evidence.record import StepRecord

MIN_DEVIATIONS = 6.0  # standard deviations of the number of rows that are equal at their place
MIN_EXCESS = 8.0  # rows above the expectation
MIN_GROUP = 2  # completions: a single one has no other place
MAX_SORTED_FRACTION = 0.8  # of the groups: rows in order of length or reward are no exchange

Texts = tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedDraws:
    """Rows whose prompt came before, in other weights' generation, with as many completions."""

    rows: int
    equal: float
    """Rows with the completion that their place in the group had before."""
    expected: float
    """The mean over all orders of the group, that is by chance."""
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Generation:
    oldest: int
    newest: int
    """Versions of the weights that sampled."""
    groups: dict[bytes, list[Texts]]
    """Completions by prompt, in the order of their places."""


def find_repeated_draws(case: Case) -> RepeatedDraws | None:
    """Return the counts if rows of the recent steps repeat their place more than chance does."""
    measured = [case.measure_once(_measure_generation, record) for record in case.recent_records]
    rows, equal, expected, variance = 0, 0.0, 0.0, 0.0
    for before, now in _repeated_groups([found for found in measured if found is not None]):
        match = np.array([[one == other for other in now] for one in before], np.float64)
        centred = match - match.mean(0) - match.mean(1)[:, None] + match.mean()
        rows += len(now)
        equal += float(np.trace(match))
        expected += float(match.sum()) / len(now)
        variance += float(np.square(centred).sum()) / (len(now) - 1)
    limit = expected + max(MIN_DEVIATIONS * float(np.sqrt(variance)), MIN_EXCESS)
    if equal <= limit:
        return None
    return RepeatedDraws(rows=rows, equal=equal, expected=expected, limit=limit)


def _repeated_groups(generations: Sequence[_Generation]) -> Iterator[tuple[Texts, Texts]]:
    """Yield groups of one prompt and size in successive generations, sampled by other weights.

    Later updates on a generation record its rows again.
    """
    for before, now in pairwise(generations):
        if now.oldest <= before.newest:
            continue
        for prompt, groups in now.groups.items():
            for one, other in zip(before.groups.get(prompt, ()), groups, strict=False):
                if len(one) == len(other):
                    yield one, other


def _measure_generation(record: StepRecord) -> _Generation | None:
    """Return the groups of a step; None if versions or prompts are unknown, or rows are sorted."""
    prompts, versions = prompts_of_rows(record), record.weight_version
    if prompts is None or versions is None or not len(versions):
        return None
    rows_by_group: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
    order = np.arange(record.num_rows) if record.sample is None else np.argsort(record.sample)
    for row in order.tolist():
        rows_by_group[int(record.group[row]), prompts[row]].append(row)
    members = [rows for rows in rows_by_group.values() if len(rows) >= MIN_GROUP]
    if record.sample is None and _is_sorted(record, members):
        return None
    bounds = record.row_offsets.tolist()
    texts = [record.token_ids[start:end].tobytes() for start, end in pairwise(bounds)]
    groups: defaultdict[bytes, list[Texts]] = defaultdict(list)
    for rows in sorted(members):
        groups[prompts[rows[0]]].append(tuple(texts[row] for row in rows))
    return _Generation(oldest=int(versions.min()), newest=int(versions.max()), groups=dict(groups))


def _is_sorted(record: StepRecord, members: Sequence[list[int]]) -> bool:
    """Return whether most groups with several lengths or rewards have them in order."""
    columns = [np.diff(record.row_offsets).astype(np.float64)]
    if record.reward is not None:
        columns.append(np.nan_to_num(np.asarray(record.reward, np.float64)))
    for column in columns:
        steps = [np.diff(column[rows]) for rows in members]
        steps = [step for step in steps if np.count_nonzero(step)]
        rising, falling = (sum(bool((s * step >= 0).all()) for step in steps) for s in (1, -1))
        if steps and max(rising, falling) > MAX_SORTED_FRACTION * len(steps):
            return True
    return False
