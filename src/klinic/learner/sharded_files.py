"""What several processes train, as files that any number of processes can load again.

Each process writes its shards as safetensors, and their headers say which part of which tensor they
hold: PyTorch's distributed checkpoint without its own metadata file, which is a pickle.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from klinic.errors import CheckpointError, first_line

UNREADABLE = (CheckpointException, SafetensorError, OSError, ValueError, RuntimeError)


def save_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, each process what it has of them."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    save(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())


def load_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors with what was saved, however many processes wrote it."""
    reader = HuggingFaceStorageReader(str(folder))
    if not tensors:  # an optimiser that has not made an update
        return
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())
    except UNREADABLE as error:
        raise CheckpointError(
            f"{folder} does not hold what this recipe trains ({first_line(error)}). Resume with "
            "the recipe the run was started with; learner.shards alone may differ."
        ) from error


def saved_names(folder: Path) -> set[str]:
    """Return the names of the tensors that were saved."""
    reader = HuggingFaceStorageReader(str(folder))
    return set(reader.read_metadata().state_dict_metadata)
