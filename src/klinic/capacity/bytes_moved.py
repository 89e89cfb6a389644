"""Estimate the bytes that a step moves between processes and writes to disk.

Rank 0 sends each rank its rows (`SENT_TOKEN_BYTES`); results per token stay there, except those of
the doctor's sample (`RESULT_TOKEN_BYTES`, and `REFERENCE_TOKEN_BYTES` with a reference). Bytes are
those of the Arrow columns: a boolean is one bit.
"""

import math
from collections.abc import Mapping

from klinic.capacity.flops import DecoderShape, StepSizes
from klinic.capacity.memory import BF16_BYTES, FP32_BYTES
from klinic.evidence.step_sample import MIN_GROUPS, SAMPLED_TOKENS

SENT_TOKEN_BYTES: Mapping[str, int | float] = {
    "token_ids": 4,
    "loss_mask": 1 / 8,
    "emitted_by": 1,
    "logp_sampler": 4,
    "weight_version": 4,
}
"""Bytes per completion token in the rows that rank 0 sends."""
RESULT_TOKEN_BYTES: Mapping[str, int | float] = {"logp": 4, "logp_old": 4, "entropy": 4, "rank": 8}
"""Bytes per completion token in the results of an update."""
REFERENCE_TOKEN_BYTES: Mapping[str, int | float] = {"logp_ref": 4, "kl_exact": 4}
"""Additional bytes with a reference."""
PROMPT_TOKEN_BYTES = 4  # bytes, repeated in every row of the prompt
ROW_BYTES = 128  # bytes of a completion's scalar columns, list offsets and place in the step

STORED_FLOATS = ("logp_sampler", "logp", "logp_old", "entropy")
"""Columns on disk that do not compress; masks and versions take almost no space."""
STORED_FLOAT_BYTES = 3.7  # bytes: 4 before zstd, which saves little because only exponents repeat
STORED_RANK_BYTES = 1.0  # bytes: most tokens have a small rank
STORED_ROW_BYTES = 16  # bytes
FILE_BYTES = 3_300  # bytes: metadata of 20 columns


def sent_bytes(sizes: StepSizes) -> float:
    """Return the bytes of all rows of a step, each of which rank 0 sends to one rank."""
    tokens = sizes.num_completion_tokens * sum(SENT_TOKEN_BYTES.values())
    return tokens + PROMPT_TOKEN_BYTES * sizes.num_prompt_tokens + ROW_BYTES * sizes.rows


def sample_bytes(sizes: StepSizes) -> int | float:
    """Return the bytes of the results of the doctor's sample, which ranks add up in each update."""
    per_token = sum(RESULT_TOKEN_BYTES.values())
    if sizes.reference:
        per_token += sum(REFERENCE_TOKEN_BYTES.values())
    tokens = max(SAMPLED_TOKENS, MIN_GROUPS * sizes.group * sizes.completion_length)
    return sizes.updates * per_token * min(tokens, sizes.num_completion_tokens)


def sync_bytes(shape: DecoderShape, bytes_per_value: int) -> int:
    """Return the bytes of the trained weights as sent to a sampler, in its dtype."""
    return bytes_per_value * shape.num_trained


def pass_bytes(shape: DecoderShape) -> int:
    """Return the bytes of all weights as a pass gathers them with `model.dtype: bf16`.

    Layers are gathered in bf16, the embedding and the head in fp32.
    """
    ends = shape.num_parameters - shape.num_layer_parameters
    return BF16_BYTES * shape.num_layer_parameters + FP32_BYTES * ends


def gathered_bytes(shape: DecoderShape, sizes: StepSizes, *, num: int) -> float:
    """Return the bytes that each of `num` shards receives in a step with `model.dtype: bf16`.

    A forward pass gathers every weight; while a batch is scored, the head stays gathered. A
    backward pass gathers the layers again and reduces the gradient of the trained weights in fp32.
    A reference with weights of its own gathers its head once more in every update, for the exact
    KL.
    """
    if num == 1:
        return 0.0
    passes = -(-sizes.rows // (sizes.micro_batch * num))
    forward, head = pass_bytes(shape), FP32_BYTES * shape.hidden * shape.vocabulary
    update = forward + BF16_BYTES * shape.num_layer_parameters + FP32_BYTES * shape.num_trained
    if sizes.reference and shape.trains_all:
        update += head
    scored = sizes.scores_old + sizes.reference + sizes.num_extra_reference_passes
    scoring = scored * (passes * forward - (passes - 1) * head)
    updating = passes * sizes.updates * (1 + sizes.split_gradient_fraction) * update
    return (scoring + updating) * (num - 1) / num


def stored_per_token(shape: DecoderShape, *, group: int, reference: bool) -> float:
    """Return the compressed bytes per completion token in a record on disk."""
    num_floats = float(len(STORED_FLOATS))
    if reference:
        num_floats += 1 + 1 / group  # the exact KL covers one completion per group
    return STORED_FLOAT_BYTES * num_floats + _id_bytes(shape) + STORED_RANK_BYTES


def stored_bytes(shape: DecoderShape, sizes: StepSizes) -> float:
    """Return the bytes of a step's record on disk, written by one process."""
    token = stored_per_token(shape, group=sizes.group, reference=sizes.reference)
    prompts = _id_bytes(shape) * sizes.prompts * sizes.prompt_length  # zstd deduplicates them
    return (
        FILE_BYTES + STORED_ROW_BYTES * sizes.rows + prompts + token * sizes.num_completion_tokens
    )


def _id_bytes(shape: DecoderShape) -> float:
    """Return the bytes of a token id under dictionary encoding."""
    return math.log2(shape.vocabulary) / 8
