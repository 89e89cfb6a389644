"""The sample of a step that the live doctor of several processes sees: its first whole groups.

A record of all rows would grow with the number of processes, and one of them runs the checks. The
order of the groups is that of the shuffled prompts. `klinic diagnose` reads all rows from the
files.
"""

from dataclasses import replace

import numpy as np

from klinic.evidence.record import StepRecord, first_rows

SAMPLED_TOKENS = 1 << 15
"""Tokens of completions, about; a smaller step is its own sample."""
MIN_GROUPS = 4
STEP_ROWS = "step_rows"
"""Fact of a sample: the number of rows of the step."""
SUMS = ("loss", "loss_denominator", "num_empty_micro_batches")
"""Facts that a sample does not have: sums over all rows, which those of a sample contradict."""


def num_sampled_rows(record: StepRecord) -> int:
    """Return how many of the first rows of a step are its sample."""
    is_end = np.append(record.group[1:] != record.group[:-1], True)
    ends = np.flatnonzero(is_end) + 1
    num_fitting = int(np.searchsorted(record.row_offsets[ends], SAMPLED_TOKENS, side="right"))
    num = max(num_fitting, MIN_GROUPS)
    return int(ends[num - 1]) if num < len(ends) else record.num_rows


def sample_record(record: StepRecord) -> StepRecord:
    """Return the sample of a step, or the whole record if it is small."""
    return mark_sample(first_rows(record, num_sampled_rows(record)), record.num_rows)


def mark_sample(record: StepRecord, num_rows: int) -> StepRecord:
    """Return rows of a step of `num_rows` rows without the facts that are sums over all."""
    if record.num_rows == num_rows:
        return record
    facts = {name: fact for name, fact in record.facts.items() if name not in SUMS}
    return replace(record, facts={**facts, STEP_ROWS: num_rows, "generation_rows": num_rows})
