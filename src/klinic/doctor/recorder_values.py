"""Checks the codes, names, hashes and versions that a loop passes to `klinic.Recorder`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from klinic.doctor.recorder_settings import offer_names
from klinic.errors import EvidenceError
from klinic.evidence.batch_arrays import to_number
from klinic.evidence.record import EmittedBy

FINISH_REASONS = ("stop", "length")


def read_version(where: str, name: str, value: Any) -> int | None:
    """Return a number of updates, which is one integer; None stays None."""
    number = to_number(where, name, value)
    if number is None or (isinstance(number, int) and number >= 0):
        return number
    raise EvidenceError(
        f"{where}: `{name}` is {number}. Pass a number of updates: an integer, 0 or more."
    )


def read_step(value: Any, *, last: int) -> int:
    """Return the number of a step: the given one, which must be above the last, or the next."""
    number = to_number(f"the step after step {last}", "step", value)
    if number is None:
        return last + 1
    if isinstance(number, int) and number > last:
        return number
    raise EvidenceError(
        f"`step` is {number} and the last recorded step was {last}. Pass an integer above it, or "
        "leave it out: then steps are counted."
    )


def check_emitter_codes(where: str, emitted_by: np.ndarray | None) -> None:
    """Raise `EvidenceError` if a source of a token is no code of `EmittedBy`."""
    if emitted_by is None or np.isin(emitted_by, list(EmittedBy)).all():
        return
    wrong = emitted_by[~np.isin(emitted_by, list(EmittedBy))][0]
    codes = ", ".join(f"{code.value} ({code.name.lower()})" for code in EmittedBy)
    raise EvidenceError(f"{where}: `emitted_by` contains {wrong}. Use {codes}.")


def check_finish_reasons(where: str, reasons: np.ndarray | None) -> None:
    """Raise `EvidenceError` if a finish reason is not known."""
    for reason in () if reasons is None else np.unique(reasons).tolist():
        if reason not in ("", *FINISH_REASONS):
            raise EvidenceError(
                f"{where}: `finish_reason` contains {reason!r}. "
                f'{offer_names(reason, FINISH_REASONS)}, or "" if it is unknown.'
            )


def read_hashes(
    where: str, rank_weights: Sequence[str] | None, published: str | None, loaded: str | None
) -> dict[str, str | int | None]:
    """Return the facts about weights: two hashes, and the number of different ones of the ranks."""
    return {
        "num_rank_weights": _count_different_hashes(where, rank_weights),
        "weights_published": _read_hash(where, "weights_published", published),
        "weights_loaded": _read_hash(where, "weights_loaded", loaded),
    }


def _read_hash(where: str, name: str, value: Any) -> str | int | None:
    """Return a hash of weights, which is text or an integer."""
    if value is None or isinstance(value, str | int):
        return value
    raise EvidenceError(
        f"{where}: `{name}` is of type {type(value).__name__}. Pass a hash of the weights as text, "
        "not the weights."
    )


def _count_different_hashes(where: str, hashes: Sequence[str] | None) -> int | None:
    """Return the number of different hashes of weights; None stays None."""
    if hashes is None:
        return None
    if isinstance(hashes, str):
        raise EvidenceError(
            f"{where}: `rank_weights` is one string. Pass a list with a hash for each process."
        )
    return len({_read_hash(where, "rank_weights", value) for value in hashes})
