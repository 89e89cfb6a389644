"""Fingerprints of single tensors, to find those that a transfer dropped, scaled or swapped.

A fingerprint is the norm of a tensor and a hash of evenly spaced entries: cheap next to the
transfer itself, and computed by ranks on their own rows as well as on a whole tensor.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from klinic.evidence.fields import NOTHING_ARRIVED
from klinic.model.weights import sample_entries

NORM_TOLERANCE = 1e-4  # relative; fp32 sums of blocks differ by 1e-6, a lost 512th by 1e-3
CPU_BLOCK = 2**18  # entries summed at a time: they stay in the cache
BLOCK = 2**24
NUM_NAMED = 3  # tensors that a message names


@dataclass(frozen=True, slots=True)
class TensorPrint:
    """The fingerprint of a tensor."""

    norm: float
    sample: str
    """Hash of evenly spaced entries."""


@torch.no_grad()
def print_tensor(tensor: Tensor) -> TensorPrint:
    """Return the fingerprint of a whole tensor."""
    return TensorPrint(
        math.sqrt(float(sum_of_squares(tensor))), hash_entries(sample_entries(tensor))
    )


def sum_of_squares(tensor: Tensor) -> Tensor:
    """Return the sum of squares in float64, without a copy of the tensor."""
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    size = CPU_BLOCK if tensor.device.type == "cpu" else BLOCK
    for block in torch.split(tensor.reshape(-1), size):
        exact = block.to(torch.promote_types(block.dtype, torch.float32))
        total += torch.dot(exact, exact)
    return total


def hash_entries(entries: Tensor) -> str:
    """Return a short hash of entries."""
    data = entries.detach().cpu().contiguous().view(torch.uint8).numpy().data
    return hashlib.sha256(data).hexdigest()[:16]


def describe_damage(
    sent: Mapping[str, TensorPrint], arrived: Sequence[Mapping[str, TensorPrint]]
) -> str:
    """Return what is wrong with the tensors that arrived, at any receiver; empty if nothing is.

    >>> sent = {"a": TensorPrint(2.0, "1"), "b": TensorPrint(3.0, "2")}
    >>> describe_damage(sent, [sent, {"a": TensorPrint(4.0, "9"), "b": TensorPrint(3.0, "2")}])
    'a arrived with 2 times its norm'
    >>> describe_damage(sent, [{"a": TensorPrint(3.0, "2")}])
    'a arrived as b, b did not arrive'
    """
    for prints in arrived:
        if not prints and sent:
            return NOTHING_ARRIVED
        faults = [
            f"{name} {fault}"
            for name, expected in sent.items()
            if (fault := _find_fault(expected, prints.get(name), sent))
        ]
        if faults:
            rest = f" and {len(faults) - NUM_NAMED} more" if len(faults) > NUM_NAMED else ""
            return ", ".join(faults[:NUM_NAMED]) + rest
    return ""


def _find_fault(
    expected: TensorPrint, received: TensorPrint | None, sent: Mapping[str, TensorPrint]
) -> str:
    """Return what happened to one tensor; empty if nothing did."""
    if received is None:
        return "did not arrive"
    has_norm = math.isclose(received.norm, expected.norm, rel_tol=NORM_TOLERANCE, abs_tol=1e-30)
    if received.sample == expected.sample and (has_norm or not math.isfinite(expected.norm)):
        return ""
    name_of_other = next((name for name, one in sent.items() if one == received), None)
    if name_of_other is not None:
        return f"arrived as {name_of_other}"
    if received.norm == 0:
        return "arrived as zeros"
    if has_norm or expected.norm == 0:
        return "arrived with other entries"
    return f"arrived with {received.norm / expected.norm:.4g} times its norm"
