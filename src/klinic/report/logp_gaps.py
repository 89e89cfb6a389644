"""The three log-prob gaps of a token. The open gap identifies the class of a fault.

lane        gap                      open if
update      logp - logp_old          several updates per batch, or an update that is too large
sampler     logp_old - logp_sampler  the sampler is not the policy: stale, rounded, transformed
reference   logp_old - logp_ref      the policy moved, which the KL measures
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from klinic.evidence.record import StepRecord
from klinic.maths.kl import k3

LANES = ("update", "sampler", "reference")
GAP_FIELDS = {
    "update": ("logp", "logp_old"),
    "sampler": ("logp_old", "logp_sampler"),
    "reference": ("logp_old", "logp_ref"),
}
NUM_POSITIONS = 48  # columns of a lane: token positions in bins
MAX_NATS = 1e30  # nats; larger values are no log-probs, and sums must stay finite
MAX_POSITIONS = 1 << 15  # token positions in the KL profile
NUM_STEPS = 120  # rows of a lane at most; longer runs are subsampled


def logp_gap(record: StepRecord, lane: str) -> Float[np.ndarray, "N"] | None:
    """Return one signed gap per token; NaN if the token is masked out or a log-prob is missing."""
    first, second = (getattr(record, name) for name in GAP_FIELDS[lane])
    if lane == "update" and second is None:
        second = first  # one forward pass served both, so the gap is zero
    if first is None or second is None:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        difference = np.clip(
            first.astype(np.float64) - second.astype(np.float64), -MAX_NATS, MAX_NATS
        )
    gaps: np.ndarray = np.where(record.loss_mask, difference, np.nan)
    return gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class GapLane:
    """Mean size of one gap by step and by position in the completion."""

    name: str
    steps: list[int]
    width: int
    """Tokens per position bin."""
    sizes: Float[np.ndarray, "S P"]
    """Mean absolute gap in nats; NaN without tokens."""


def compute_lanes(records: Iterable[StepRecord], longest: int | None = None) -> list[GapLane]:
    """Return the lanes that the records have fields for, with one record in memory at a time.

    `longest` is the token count of the longest completion, if known.
    """
    if longest is None:
        longest = max(map(longest_row, records), default=0)
    width = max(1, -(-longest // NUM_POSITIONS))
    num = max(1, -(-longest // width))
    steps: dict[str, list[int]] = {name: [] for name in LANES}
    rows: dict[str, list[np.ndarray]] = {name: [] for name in LANES}
    for record in records:
        for name in LANES:
            sizes = logp_gap(record, name)
            if sizes is not None:
                steps[name].append(record.step)
                rows[name].append(_mean_by_position(sizes, record, width, num))
    return [
        GapLane(name=name, steps=steps[name], width=width, sizes=np.array(rows[name]))
        for name in LANES
        if steps[name]
    ]


def longest_row(record: StepRecord) -> int:
    """Return the token count of a record's longest completion."""
    return int(np.diff(record.row_offsets).max(initial=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class KLProfile:
    """Sum of k3 at each token position, for one step."""

    step: int
    count: Int[np.ndarray, "P"]
    total: Float[np.ndarray, "P"]


def kl_profile(record: StepRecord) -> KLProfile | None:
    """Return the KL of a step by token position; None if log-probs are missing."""
    k3_values = token_k3(record)
    if k3_values is None:
        return None
    position = token_positions(record)
    valid = np.isfinite(k3_values) & (position < MAX_POSITIONS)
    return KLProfile(
        step=record.step,
        count=np.bincount(position[valid]),
        total=np.bincount(position[valid], k3_values[valid]).astype(np.float64),  # int if empty
    )


def kl_by_position(profiles: Sequence[KLProfile]) -> dict[str, list[float]]:
    """Return the mean k3 at each token position, for the first and last quarter of the steps."""
    if not profiles:
        return {}
    part = max(1, len(profiles) // 4)
    parts = {"first": profiles[:part], "last": profiles[-part:]}
    return {
        f"{label} steps, {some[0].step} to {some[-1].step}": _mean_profile(some)
        for label, some in parts.items()
    }


def _mean_profile(profiles: Sequence[KLProfile]) -> list[float]:
    longest = max(len(profile.count) for profile in profiles)
    count, total = np.zeros(longest), np.zeros(longest)
    for profile in profiles:
        count[: len(profile.count)] += profile.count
        total[: len(profile.total)] += profile.total
    return [float(value) for value in np.where(count > 0, total / np.maximum(count, 1), 0.0)]


def token_k3(record: StepRecord) -> Float[np.ndarray, "N"] | None:
    """Return the k3 of each trained token, non-negative; NaN if unknown."""
    if record.logp_ref is None or record.logp_old is None:
        return None
    both = {name: getattr(record, name).astype(np.float64) for name in ("logp_old", "logp_ref")}
    with np.errstate(over="ignore", invalid="ignore"):
        k3_values = k3(logp_p=both["logp_old"], logp_q=both["logp_ref"])
    valid = record.loss_mask & np.isfinite(k3_values)
    trained: np.ndarray = np.where(valid, np.minimum(k3_values, MAX_NATS), np.nan)
    return trained


def subsample_steps(steps: Sequence[int], num: int, keep: Sequence[int] = ()) -> list[int]:
    """Return at most `num` of the steps including first and last, plus the steps to keep.

    >>> subsample_steps(range(1, 101), 4, keep=[7])
    [1, 7, 34, 67, 100]
    """
    if len(steps) <= num:
        return list(steps)
    indices = np.linspace(0, len(steps) - 1, num).round().astype(int)
    return sorted({steps[i] for i in indices} | (set(keep) & set(steps)))


def token_positions(record: StepRecord) -> Int[np.ndarray, "N"]:
    """Return the position of every token in its completion, from 0."""
    starts = np.repeat(record.row_offsets[:-1], np.diff(record.row_offsets))
    indices: np.ndarray = np.arange(record.num_tokens) - starts
    return indices


def _mean_by_position(sizes: np.ndarray, record: StepRecord, width: int, num: int) -> np.ndarray:
    bins = token_positions(record) // width
    finite = np.isfinite(sizes)
    total = np.bincount(bins[finite], np.abs(sizes[finite]), minlength=num)
    count = np.bincount(bins[finite], minlength=num)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(total / np.where(count, count, np.nan))
