"""Compare two gradients, or two scorings of the same tokens."""

from collections.abc import Iterable

import torch
from torch import Tensor

from klinic.model.weights import whole

SAME = 0.01  # relative tolerance of a gradient: bf16 rounding reaches it
SAMPLED = 4096  # compared gradient entries per tensor

Answer = dict[str, float | str | None]


def sampled_entries(gradients: Iterable[Tensor]) -> Tensor:
    """Return evenly spaced entries of every gradient, concatenated."""
    parts = [whole(g.detach()).reshape(-1) for g in gradients]
    flat = [p[:: max(1, p.numel() // SAMPLED)].double() for p in parts]
    return torch.cat(flat) if flat else torch.zeros(1, dtype=torch.float64)


def is_kept(found: Tensor, promised: Tensor) -> bool:
    """Whether a gradient equals the expected one up to rounding."""
    found, promised = same_length(found, promised)
    return norm(found - promised) <= SAME * max(norm(promised), norm(found))


def compared(found: Tensor, expected: Tensor) -> Answer:
    """Return norm and direction of a gradient relative to the expected one."""
    found, expected = same_length(found, expected)
    square = float((expected * expected).sum())
    return {
        "ratio": float((found * expected).sum()) / square if square else None,
        "cosine": cosine(found, expected) if square else None,
        "norm": norm(found),
        "expected_norm": norm(expected),
    }


def same_length(found: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Pad both to the same length: a gradient that was cut off has no entries."""
    length = max(len(found), len(expected))
    grown = [torch.nn.functional.pad(v, (0, length - len(v))) for v in (found, expected)]
    return grown[0], grown[1]


def cosine(one: Tensor, other: Tensor) -> float:
    """Return the cosine between two gradients."""
    one, other = same_length(one, other)
    return float((one * other).sum()) / max(norm(one) * norm(other), 1e-300)


def norm(vector: Tensor) -> float:
    """Return the Euclidean norm of a gradient."""
    return float(vector.norm())


def apart(one: Tensor, other: Tensor) -> Answer:
    """Return the largest and mean difference of two scorings, in nats."""
    difference = (one - other).abs()
    return {"largest": float(difference.max()), "mean": float(difference.mean())}
