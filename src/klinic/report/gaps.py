"""The three log-prob gaps of a token. Which of them is open names the class of a fault.

lane        gap                      open where
update      logp - logp_old          several updates a batch, or an update that is too big
sampler     logp_old - logp_sampler  the sampler is not the policy: stale, rounded, transformed
reference   logp_old - logp_ref      the policy has moved, which is what a KL measures
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from klinic.evidence.record import StepRecord
from klinic.maths.kl import k3

LANES = ("update", "sampler", "reference")
SIDES = {
    "update": ("logp", "logp_old"),
    "sampler": ("logp_old", "logp_sampler"),
    "reference": ("logp_old", "logp_ref"),
}
NUM_POSITIONS = 48  # columns of a lane: tokens from the beginning of a completion, in bins
LARGEST = 1e30  # nats; what is beyond it in a record is no log-prob, and sums must stay finite
NUM_STEPS = 120  # rows of a lane at most; longer runs are thinned


def gap(record: StepRecord, lane: str) -> Float[np.ndarray, "N"] | None:
    """Return one gap of every token, signed; NaN where it is not trained on or not known."""
    first, second = (getattr(record, name) for name in SIDES[lane])
    if lane == "update" and second is None:
        second = first  # one forward served both, so nothing lies between them
    if first is None or second is None:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        far = np.clip(first.astype(np.float64) - second.astype(np.float64), -LARGEST, LARGEST)
    found: np.ndarray = np.where(record.loss_mask, far, np.nan)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The size of one gap, by step and by position in the completion."""

    name: str
    steps: list[int]
    width: int
    """Tokens in a bin of positions."""
    sizes: Float[np.ndarray, "S P"]
    """Mean absolute gap, nats; NaN where there is no token."""


def lanes(records: Sequence[StepRecord]) -> list[Lane]:
    """Return the lanes that the records have the fields for."""
    longest = max((int(np.diff(r.row_offsets).max(initial=0)) for r in records), default=0)
    width = max(1, -(-longest // NUM_POSITIONS))
    num = max(1, -(-longest // width))
    found = []
    for name in LANES:
        rows = [(record.step, gap(record, name), record) for record in records]
        known = [(step, sizes, record) for step, sizes, record in rows if sizes is not None]
        if known:
            found.append(
                Lane(
                    name=name,
                    steps=[step for step, _, _ in known],
                    width=width,
                    sizes=np.array([_by_position(s, r, width, num) for _, s, r in known]),
                )
            )
    return found


def kl_by_position(records: Sequence[StepRecord]) -> dict[str, list[float]]:
    """Return the mean k3 at each place of a completion, in the first and the last steps."""
    known = [r for r in records if r.logp_ref is not None and r.logp_old is not None]
    if not known:
        return {}
    part = max(1, len(known) // 4)
    parts = {"first": known[:part], "last": known[-part:]}
    return {
        f"{label} steps, {some[0].step} to {some[-1].step}": _k3_by_position(some)
        for label, some in parts.items()
    }


def token_k3(record: StepRecord) -> Float[np.ndarray, "N"] | None:
    """Return what each trained token owns of the KL, never negative; NaN where not known."""
    if record.logp_ref is None or record.logp_old is None:
        return None
    both = {name: getattr(record, name).astype(np.float64) for name in ("logp_old", "logp_ref")}
    with np.errstate(over="ignore", invalid="ignore"):
        own = k3(logp_p=both["logp_old"], logp_q=both["logp_ref"])
    known = record.loss_mask & np.isfinite(own)
    found: np.ndarray = np.where(known, np.minimum(own, LARGEST), np.nan)
    return found


def _k3_by_position(records: Sequence[StepRecord]) -> list[float]:
    places, values = [], []
    for record in records:
        own = token_k3(record)
        assert own is not None  # noqa: S101 - the caller chose those that have it
        known = np.isfinite(own)
        places.append(positions(record)[known])
        values.append(own[known])
    place, value = np.concatenate(places), np.concatenate(values)
    count, total = np.bincount(place), np.bincount(place, value)
    return [float(t / c) if c else 0.0 for t, c in zip(total, count, strict=True)]


def thinned(steps: Sequence[int], num: int, keep: Sequence[int] = ()) -> list[int]:
    """Return at most `num` of the steps, first and last among them, and those to keep.

    >>> thinned(range(1, 101), 4, keep=[7])
    [1, 7, 34, 67, 100]
    """
    if len(steps) <= num:
        return list(steps)
    places = np.linspace(0, len(steps) - 1, num).round().astype(int)
    return sorted({steps[i] for i in places} | (set(keep) & set(steps)))


def positions(record: StepRecord) -> Int[np.ndarray, "N"]:
    """Return the place of every token in its completion, from 0."""
    starts = np.repeat(record.row_offsets[:-1], np.diff(record.row_offsets))
    places: np.ndarray = np.arange(record.num_tokens) - starts
    return places


def _by_position(sizes: np.ndarray, record: StepRecord, width: int, num: int) -> np.ndarray:
    place = positions(record) // width
    known = np.isfinite(sizes)
    total = np.bincount(place[known], np.abs(sizes[known]), minlength=num)
    count = np.bincount(place[known], minlength=num)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(total / np.where(count, count, np.nan))
