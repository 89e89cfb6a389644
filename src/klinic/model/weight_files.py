"""The safetensors files of a saved model, read by rows: no tensor is loaded whole."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

ONE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
BF16 = "BF16"


class WeightFiles:
    """The tensors of one or several safetensors files, by name."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """Take the file of each tensor."""
        self._files = dict(files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        with safe_open(self._files[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def is_bf16(self, name: str) -> bool:
        """Whether a tensor is stored in bf16."""
        with safe_open(self._files[name], framework="pt") as file:
            return bool(file.get_slice(name).get_dtype() == BF16)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of a tensor in the dtype of its file.

        The rows are pages of the file. They leave memory with the tensor, because the file is
        opened for each call.
        """
        with safe_open(self._files[name], framework="pt") as file:
            rows: Tensor = file.get_slice(name)[start:stop]
            return rows

    def read_tensor(self, name: str) -> Tensor:
        """Return a whole tensor, which may have no rows."""
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor


def find_weight_files(name: str) -> WeightFiles | None:
    """Return the safetensors files of a folder or a hub id; None if it has none."""
    from transformers.utils import cached_file

    optional = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    if (one := cached_file(name, ONE_FILE, **optional)) is not None:
        with safe_open(one, framework="pt") as file:
            return WeightFiles(dict.fromkeys(file.keys(), Path(one)))
    if (index := cached_file(name, INDEX_FILE, **optional)) is None:
        return None
    file_of = json.loads(Path(index).read_text())["weight_map"]
    paths = {file: cached_file(name, file, **optional) for file in set(file_of.values())}
    if None in paths.values():
        return None
    return WeightFiles({tensor: Path(str(paths[file])) for tensor, file in file_of.items()})
