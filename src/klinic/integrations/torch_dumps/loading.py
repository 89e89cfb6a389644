"""Loads a file of torch.save without executing anything, and checks the values in it."""

import os
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from klinic.errors import EvidenceError
from klinic.evidence.files import open_file, refuse_sparse

LARGEST = 1 << 34  # bytes of a file: a step of 16,000 completions of 32,000 tokens
MOST_TOKENS = 1 << 22  # of a completion
MOST_ROWS = 1 << 20  # of a step
LARGEST_BATCH = 1 << 27  # tokens of a step
LARGEST_ID = 2**31
ADVICE = "It was cut short or edited; restore it from a copy, or remove the file"


def load_file(path: Path) -> "Fields":
    """Return the dict in a file; raise `EvidenceError` if it is not one of plain values."""
    with open_file(path) as file:
        refuse_sparse(file, path)
        _check_archive(file, path)
        file.seek(0)
        try:
            value = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise EvidenceError(_refused_message(path, error)) from error
        except Exception as error:  # the loader raises many kinds of errors for damaged files
            if isinstance(error, MemoryError):
                raise
            raise EvidenceError(
                f"{path}: is not a file of torch ({_first(error)}). {ADVICE}."
            ) from (error)
    if not isinstance(value, dict):
        raise EvidenceError(
            f"{path}: holds a {type(value).__name__}, and not a dict of columns. Pass the folder "
            "that the trainer dumped."
        )
    return Fields(value, str(path))


def _check_archive(file: IO[bytes], path: Path) -> None:
    """Raise `EvidenceError` unless the file is an archive whose members are not compressed."""
    size = os.fstat(file.fileno()).st_size
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise EvidenceError(f"{path}: is not a file of torch ({error}). {ADVICE}.") from error
    # torch stores members as they are; a compressed one may expand to any size
    total = sum(member.file_size for member in members)
    if size > LARGEST or total > size or any(m.compress_type for m in members):
        raise EvidenceError(
            f"{path}: is an archive of {total:,} bytes in a file of {size:,}, which torch does not "
            f"write. {ADVICE}."
        )


def _refused_message(path: Path, error: Exception) -> str:
    text = str(error)
    found = next((line for line in text.splitlines() if "GLOBAL" in line or "global" in line), text)
    return (
        f"{path}: holds more than tensors, numbers and texts ({found.strip()[:160]}), and loading "
        "it could execute code. NumPy values in `reward` or `metadata` of a sample are a usual "
        "cause: convert them to Python numbers where the reward is computed."
    )


def _first(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:160]


@dataclass(frozen=True, slots=True)
class Fields:
    """A dict of a dump, and its place for messages."""

    values: dict[Any, Any]
    where: str

    def get(self, name: str) -> Any:
        """Return a value; None if there is none."""
        return self.values.get(name)

    def dicts(self, name: str) -> "list[Fields]":
        """Return a list of dicts."""
        entries = self.get(name)
        if not isinstance(entries, list) or len(entries) > MOST_ROWS:
            raise self.error(name, "a list of samples")
        if not all(isinstance(entry, dict) for entry in entries):
            raise self.error(name, "a list of dicts")
        return [Fields(entry, f"{self.where}, {name}[{n}]") for n, entry in enumerate(entries)]

    def whole(self, name: str) -> int:
        """Return an integer of at least 0."""
        number = self.number(name)
        if not 0 <= number <= LARGEST_ID or number != int(number):
            raise self.error(name, "an integer")
        return int(number)

    def number(self, name: str) -> float:
        """Return a number, also one in a tensor; NaN for None or a missing field."""
        value = self.get(name)
        if isinstance(value, torch.Tensor) and value.numel() == 1 and is_plain(value):
            value = value.item()
        if value is None:
            return float("nan")
        number = as_float(value)
        if number is None:
            raise self.error(name, "a number")
        return number

    def ids(self, name: str) -> np.ndarray:
        """Return token ids."""
        column = self.floats(name)
        if column is None or not (np.isfinite(column) & (np.abs(column) < LARGEST_ID)).all():
            raise self.error(name, "a list of token ids")
        if (column != np.floor(column)).any():
            raise self.error(name, "a list of token ids")
        return column.astype(np.int64)

    def floats(self, name: str) -> np.ndarray | None:
        """Return a list or a flat tensor of numbers; None if the field is missing or None."""
        value = self.get(name)
        return None if value is None else self.column(name, value)

    def column(self, name: str, value: Any) -> np.ndarray:
        """Return a list or a flat tensor of numbers."""
        if isinstance(value, torch.Tensor):
            if value.dim() != 1 or value.numel() > MOST_TOKENS or not is_plain(value):
                raise self.error(name, f"a list of at most {MOST_TOKENS:,} numbers")
            return value.to(torch.float64).numpy()
        if not isinstance(value, list | tuple) or len(value) > MOST_TOKENS:
            raise self.error(name, f"a list of at most {MOST_TOKENS:,} numbers")
        numbers = [as_float(item) for item in value]
        if None in numbers:
            raise self.error(name, "a list of numbers")
        return np.array(numbers, np.float64)

    def error(self, name: str, wanted: str) -> EvidenceError:
        """Return the error for a field of another type."""
        return EvidenceError(f"{self.where}: `{name[:40]}` is not {wanted}. {ADVICE}.")


def refuse_large_batch(num_tokens: int, where: str) -> None:
    """Raise `EvidenceError` for a step that does not fit in memory."""
    if num_tokens > LARGEST_BATCH:
        raise EvidenceError(
            f"{where}: a step has {num_tokens:,} tokens, and the limit is {LARGEST_BATCH:,}. Dump "
            "smaller batches."
        )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a dense array of numbers in main memory, no larger than its storage."""
    is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not is_dense or tensor.is_quantized or tensor.is_complex():
        return False
    # strides of 0 would let a few bytes stand for gigabytes
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def as_float(value: Any) -> float | None:
    """Return a number as a float; None if it is not one.

    >>> [as_float(value) for value in (1, 0.5, "1", None, 10**400)]
    [1.0, 0.5, None, None, inf]
    """
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
