"""Converts vLLM's outputs to arrays, without an object for each token.

Requests set `flat_logprobs`, so vLLM reports the log-probs of a completion as flat lists: those of
the sampled token first at every position, then those of the requested most likely tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from klinic.errors import SamplerError
from klinic.model.tensor_prints import TensorPrint
from klinic.sampler.decoding import FinishReason
from klinic.sampler.rollouts import GenerationOutput, ReportedLogp, logp_array, token_array


def to_output(output: Any, *, num_top: int = 0) -> GenerationOutput:
    """Return vLLM's output of one request, which has one completion."""
    (completion,) = output.outputs
    flat, token_ids = completion.logprobs, token_array(completion.token_ids)
    if not num_top and len(flat.logprobs) == len(token_ids):
        top, logp = None, logp_array(flat.logprobs)
        is_aligned = flat.token_ids == list(completion.token_ids)
    else:
        top, sampled = _report_all(flat)
        logp = top.logp[sampled].astype(np.float32)
        is_aligned = np.array_equal(top.token_ids[sampled], token_ids)
    if not is_aligned:
        raise SamplerError(
            f"vLLM reported {len(flat.start_indices)} log-probs for the {len(token_ids)} tokens of "
            "a completion, and not of these tokens: training would score other tokens than were "
            "sampled. Use another version of vLLM, or sampler.type transformers."
        )
    return GenerationOutput(
        token_ids=token_ids,
        logp=logp,
        finish_reason=to_finish_reason(completion.finish_reason),
        top=top,
        context=token_array(output.prompt_token_ids),
        cached_tokens=int(output.num_cached_tokens or 0),
    )


def _report_all(flat: Any) -> tuple[ReportedLogp, Int[np.ndarray, "S"]]:
    """Return every reported log-prob once, and the index of the sampled token at each position."""
    starts, ids = token_array(flat.start_indices), token_array(flat.token_ids)
    positions = np.repeat(np.arange(len(starts)), np.subtract(flat.end_indices, starts))
    is_new = ids != ids[starts][positions]  # the sampled token is reported among the likeliest too
    is_new[starts] = True
    top = ReportedLogp(
        positions=positions[is_new],
        token_ids=ids[is_new],
        logp=np.array(flat.logprobs, np.float64)[is_new],
    )
    return top, np.searchsorted(top.positions, np.arange(len(starts)))


def to_finish_reason(reason: str | None) -> FinishReason:
    """Return vLLM's finish reason as a rollout has it: anything but a stop token is the length."""
    return "stop" if reason == "stop" else "length"


def parse_prints(result: Mapping[str, Sequence[Any]]) -> dict[str, TensorPrint]:
    """Return the fingerprints that a worker reports."""
    return {name: TensorPrint(float(norm), str(sample)) for name, (norm, sample) in result.items()}
