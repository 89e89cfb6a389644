"""How many bytes a step moves between processes and leaves on disk.

The first process tells the others the rows of a step (`SENT`); what all of them find out about its
tokens is summed up on each (`FOUND`, and `COMPARED` with a reference). Bytes are those of the Arrow
columns: a boolean is a bit.
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
"""Bytes of a completion token in the record that goes out."""
FOUND: Mapping[str, int | float] = {"logp": 4, "entropy": 4, "rank": 8}
"""Bytes of a completion token in what comes back from an update."""
COMPARED: Mapping[str, int | float] = {"logp_ref": 4, "kl_exact": 4}
"""The same with a reference."""
PROMPT_TOKEN = 8  # bytes, in every row that completes it
ROW = 112  # bytes of a completion's own columns, and where its lists begin

STORED_FLOATS = ("logp_sampler", "logp", "logp_old", "entropy")
"""Columns on disk whose numbers no compression makes smaller; masks and versions take nothing."""
FLOAT = 3.7  # bytes: four, of which zstd saves a little, as exponents are alike
RANK = 1.0  # bytes: most tokens are among the likeliest
STORED_ROW = 16  # bytes
FILE = 3_300  # bytes: descriptions of 20 columns


def sent_bytes(sizes: StepSizes) -> float:
    """Return the bytes of the record that the first process sends to each of the others."""
    tokens = sizes.num_completion_tokens * sum(SENT.values())
    return tokens + PROMPT_TOKEN * sizes.num_prompt_tokens + ROW * sizes.rows


def summed_bytes(sizes: StepSizes) -> int | float:
    """Return the bytes of what is summed up over all processes, in each of them."""
    found = sizes.updates * sum(FOUND.values()) + sizes.scores_old * FP32
    if sizes.reference:
        found += COMPARED["logp_ref"] + sizes.updates * COMPARED["kl_exact"]
    return found * sizes.num_completion_tokens


def sent_seconds(num_bytes: int | float, *, num: int, network: float) -> float:
    """Return how long a broadcast takes whose every receiver sends the whole on, as gloo's do.

    >>> sent_seconds(10.0, num=8, network=5.0)
    6.0
    """
    return math.ceil(math.log2(num)) * num_bytes / network if num > 1 else 0.0


def sync_bytes(shape: Shape) -> int:
    """Return the bytes of what is trained, as a sampler is given it: in fp32."""
    return FP32 * shape.num_trained


def gathered_bytes(shape: Shape, sizes: StepSizes, *, num: int) -> float:
    """Return the bytes that each of `num` shards receives in a step.

    A forward pass gathers every weight in fp32, a backward pass once more, and passes on the
    gradient of what is trained.
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
    """Return the bytes of a completion token in a record on disk, compressed."""
    num_floats = float(len(STORED_FLOATS))
    if reference:
        num_floats += 1 + 1 / group  # the exact KL is that of one completion a group
    return FLOAT * num_floats + _id_bytes(shape) + RANK


def stored_bytes(shape: Shape, sizes: StepSizes) -> float:
    """Return the bytes that the record of a step takes on disk, written by one process."""
    token = stored_per_token(shape, group=sizes.group, reference=sizes.reference)
    prompts = _id_bytes(shape) * sizes.prompts * sizes.prompt_length  # zstd folds equal ones
    return FILE + STORED_ROW * sizes.rows + prompts + token * sizes.num_completion_tokens


def _id_bytes(shape: Shape) -> float:
    """Return the bytes of a token id where ids are numbered by as few bits as they need."""
    return math.log2(shape.vocabulary) / 8
