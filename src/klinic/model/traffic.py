"""Estimate the bytes that a step moves between processes and writes to disk.

Rank 0 broadcasts the rows of a step (`SENT_TOKEN_BYTES`); per-token results are all-reduced
(`RESULT_TOKEN_BYTES`, and `REFERENCE_TOKEN_BYTES` with a reference). Bytes are those of the Arrow
columns: a boolean is one bit.
"""

import math
from collections.abc import Mapping

from klinic.model.memory import FP32
from klinic.model.shape import Shape
from klinic.model.work import StepSizes

SENT: Mapping[str, int | float] = {
    "token_ids": 8,
    "loss_mask": 1 / 8,
    "emitted_by": 1,
    "logp_sampler": 4,
    "weight_version": 8,
}
"""Bytes per completion token in the broadcast record."""
FOUND: Mapping[str, int | float] = {"logp": 4, "entropy": 4, "rank": 8}
"""Bytes per completion token in the results of an update."""
COMPARED: Mapping[str, int | float] = {"logp_ref": 4, "kl_exact": 4}
"""Additional bytes with a reference."""
PROMPT_TOKEN = 8  # bytes, repeated in every row of the prompt
ROW = 112  # bytes of a completion's scalar columns and list offsets

STORED_FLOATS = ("logp_sampler", "logp", "logp_old", "entropy")
"""Columns on disk that do not compress; masks and versions take almost no space."""
FLOAT = 3.7  # bytes: 4 before zstd, which saves little because only exponents repeat
RANK = 1.0  # bytes: most tokens have a small rank
STORED_ROW = 16  # bytes
FILE = 3_300  # bytes: metadata of 20 columns


def sent_bytes(sizes: StepSizes) -> float:
    """Return the bytes of the record that rank 0 sends to each other rank."""
    tokens = sizes.num_completion_tokens * sum(SENT.values())
    return tokens + PROMPT_TOKEN * sizes.num_prompt_tokens + ROW * sizes.rows


def summed_bytes(sizes: StepSizes) -> int | float:
    """Return the bytes that each rank all-reduces."""
    found = sizes.updates * sum(FOUND.values()) + sizes.scores_old * FP32
    if sizes.reference:
        found += COMPARED["logp_ref"] + sizes.updates * COMPARED["kl_exact"]
    return found * sizes.num_completion_tokens


def sent_seconds(num_bytes: int | float, *, num: int, network: float) -> float:
    """Return the seconds of a tree broadcast in which every receiver forwards the data (gloo).

    >>> sent_seconds(10.0, num=8, network=5.0)
    6.0
    """
    return math.ceil(math.log2(num)) * num_bytes / network if num > 1 else 0.0


def sync_bytes(shape: Shape) -> int:
    """Return the bytes of the trained weights as sent to a sampler, in fp32."""
    return FP32 * shape.num_trained


def gathered_bytes(shape: Shape, sizes: StepSizes, *, num: int) -> float:
    """Return the bytes that each of `num` shards receives in a step.

    A forward pass gathers every weight in fp32, a backward pass gathers them again and reduces the
    gradient of the trained weights.
    """
    if num == 1:
        return 0.0
    passes = -(-sizes.rows // (sizes.micro_batch * num))
    forward = FP32 * shape.num_parameters
    update = 2 * forward + FP32 * shape.num_trained
    scored = sizes.scores_old + sizes.reference + sizes.reference_again
    per_pass = scored * forward + sizes.updates * (1 + sizes.apart) * update
    return passes * per_pass * (num - 1) / num


def stored_per_token(shape: Shape, *, group: int, reference: bool) -> float:
    """Return the compressed bytes per completion token in a record on disk."""
    num_floats = float(len(STORED_FLOATS))
    if reference:
        num_floats += 1 + 1 / group  # the exact KL covers one completion per group
    return FLOAT * num_floats + _id_bytes(shape) + RANK


def stored_bytes(shape: Shape, sizes: StepSizes) -> float:
    """Return the bytes of a step's record on disk, written by one process."""
    token = stored_per_token(shape, group=sizes.group, reference=sizes.reference)
    prompts = _id_bytes(shape) * sizes.prompts * sizes.prompt_length  # zstd deduplicates them
    return FILE + STORED_ROW * sizes.rows + prompts + token * sizes.num_completion_tokens


def _id_bytes(shape: Shape) -> float:
    """Return the bytes of a token id under dictionary encoding."""
    return math.log2(shape.vocabulary) / 8
