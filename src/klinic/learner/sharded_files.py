"""Save and load trained tensors of several ranks; any number of processes can load them again.

Each rank writes its shards as safetensors whose headers describe which part of which tensor they
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

LOAD_ERRORS = (CheckpointException, SafetensorError, OSError, ValueError, RuntimeError)


def save_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors; each rank writes its shards."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    save(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())


def load_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors from saved shards, written by any number of processes."""
    reader = HuggingFaceStorageReader(str(folder))
    if not tensors:  # the optimizer has no state before its first update
        return
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())
    except LOAD_ERRORS as error:
        raise CheckpointError(
            f"{folder} does not hold the weights that this recipe trains ({first_line(error)}). "
            "Resume with the run's original recipe; only learner.shards may differ."
        ) from error


def saved_tensor_names(folder: Path) -> set[str]:
    """Return the names of the saved tensors."""
    reader = HuggingFaceStorageReader(str(folder))
    return set(reader.read_metadata().state_dict_metadata)
