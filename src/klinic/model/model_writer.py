"""Writes a model's tensors for `from_pretrained` while they are streamed, one bucket at a time."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from klinic.evidence.files import json_bytes
from klinic.model.weight_files import INDEX_FILE, ONE_FILE
from klinic.model.weight_stream import StreamPlan, WeightStream

FILE_BYTES = 50 * 10**9  # as `save_pretrained` divides a model
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
ALIGNMENT = 8  # bytes, of the header


def write_model(lm: Any, folder: Path, stream: WeightStream) -> None:
    """Write the config of a model and all tensors of a stream, under their names in the model."""
    lm.save_pretrained(folder, state_dict={})
    plan = stream.plan
    in_files = StreamPlan(
        names=plan.names, shapes=plan.shapes, dtype=plan.dtype, bucket_bytes=FILE_BYTES
    )
    files = list(in_files.buckets())
    names = [ONE_FILE]
    if len(files) > 1:
        places = range(1, len(files) + 1)
        names = [f"model-{place:05d}-of-{len(files):05d}.safetensors" for place in places]
        file_of = {name: file for file, shapes in zip(names, files, strict=True) for name in shapes}
        metadata = {"total_size": sum(_num_bytes(plan, shape) for shape in plan.shapes)}
        index = {"metadata": metadata, "weight_map": file_of}
        (folder / ONE_FILE).unlink(missing_ok=True)
        (folder / INDEX_FILE).write_bytes(json_bytes(index))
    tensors = (p for bucket in stream for p in bucket.tensors.values())
    for file_name, shapes in zip(names, files, strict=True):
        with (folder / file_name).open("wb") as file:
            _write_file(file, plan, shapes, tensors)


def _write_file(
    file: IO[bytes],
    plan: StreamPlan,
    shapes: dict[str, tuple[int, ...]],
    tensors: Iterator[Tensor],
) -> None:
    """Write one safetensors file: the length of its header, the header, the tensors in order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + _num_bytes(plan, shape)
        header[name] = {
            "dtype": DTYPE_NAMES[plan.dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for _ in shapes:
        file.write(next(tensors).cpu().view(-1).view(torch.uint8).numpy().data)


def _num_bytes(plan: StreamPlan, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * plan.dtype.itemsize
