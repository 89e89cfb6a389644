"""vLLM's flat log-probs become arrays: the sampled token's at each position, and all reported."""

from types import SimpleNamespace

import numpy as np
import pytest

from klinic.errors import SamplerError
from klinic.sampler.vllm.outputs import to_output

SAMPLED = [7, 9, 7]
LOGP = [-0.5, -1.25, -2.0]


def flat_logprobs(*positions):
    """Return the lists of vLLM's FlatLogprobs, from pairs of token and log-prob per position."""
    ends = np.cumsum([len(one) for one in positions]).tolist()
    return SimpleNamespace(
        start_indices=[0, *ends[:-1]] if ends else [],
        end_indices=ends,
        token_ids=[token for one in positions for token, _ in one],
        logprobs=[logp for one in positions for _, logp in one],
    )


def request_output(logprobs, token_ids=SAMPLED, reason="stop"):
    completion = SimpleNamespace(token_ids=token_ids, logprobs=logprobs, finish_reason=reason)
    return SimpleNamespace(outputs=[completion], prompt_token_ids=[3, 4], num_cached_tokens=None)


def sampled_only():
    return flat_logprobs(*([pair] for pair in zip(SAMPLED, LOGP, strict=True)))


def test_each_token_has_its_log_prob():
    output = to_output(request_output(sampled_only()))
    assert output.token_ids.tolist() == SAMPLED
    assert output.logp.tolist() == LOGP
    assert output.logp.dtype == np.float32
    assert output.token_ids.dtype == np.int64
    assert output.context.tolist() == [3, 4]
    assert (output.finish_reason, output.cached_tokens, output.top) == ("stop", 0, None)


def test_the_likeliest_tokens_are_reported_with_their_positions_and_once():
    flat = flat_logprobs(
        [(7, -0.5), (7, -0.5), (8, -1.0)],
        [(9, -1.25), (8, -0.25), (7, -1.0)],
        [(7, -2.0), (9, -0.5), (8, -1.0)],
    )
    output = to_output(request_output(flat), num_top=2)
    assert output.logp.tolist() == LOGP
    assert output.top.positions.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert output.top.token_ids.tolist() == [7, 8, 9, 8, 7, 7, 9, 8]
    assert output.top.logp.tolist() == [-0.5, -1.0, -1.25, -0.25, -1.0, -2.0, -0.5, -1.0]


def test_a_completion_without_tokens_is_empty():
    output = to_output(request_output(flat_logprobs(), token_ids=[], reason="length"))
    assert (len(output.token_ids), len(output.logp), output.finish_reason) == (0, 0, "length")


@pytest.mark.parametrize("num_top", [0, 1])
def test_log_probs_of_other_tokens_are_refused(num_top):
    flat = sampled_only()
    flat.token_ids[1] = 8
    with pytest.raises(SamplerError, match="not of these tokens"):
        to_output(request_output(flat), num_top=num_top)


def test_log_probs_of_fewer_tokens_are_refused():
    flat = flat_logprobs([(7, -0.5)], [(9, -1.25)])
    with pytest.raises(SamplerError, match="2 log-probs for the 3 tokens"):
        to_output(request_output(flat))
