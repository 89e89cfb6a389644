"""The log-probs that are heard while `generate` draws, against its own scores."""

import copy

import numpy as np
import pytest
import torch
from torch.nn.functional import log_softmax

from integrations.trainers import save_start

pytest.importorskip("trl")

from transformers import AutoModelForCausalLM, LogitsProcessorList
from transformers.generation import GenerationMixin

from klinic.integrations.trl import sampled_logprobs
from klinic.integrations.trl.sampled_logprobs import LogitsRecorder, record_generations

NUM_NEW = 6


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return AutoModelForCausalLM.from_pretrained(save_start(tmp_path_factory.mktemp("trl") / "lm"))


def drawn(lm, **how):
    """Return what `generate` makes of two prompts from one random state."""
    torch.manual_seed(0)
    ids = torch.tensor([[1, 2, 3], [3, 2, 1]])
    return lm.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_NEW,
        return_dict_in_generate=True,
        output_scores=True,
        eos_token_id=None,
        pad_token_id=0,
        **how,
    )


@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.5, "top_k": 5},
        {"do_sample": False},
    ],
)
def test_what_is_heard_is_what_was_drawn_from(lm, how):
    alone = drawn(lm, **how)
    with record_generations() as calls:
        made = drawn(lm, **how)
    assert torch.equal(made.sequences, alone.sequences)
    completions = made.sequences[:, 3:]
    scores = torch.stack(alone.scores, dim=1).double()
    expected = log_softmax(scores, dim=-1).gather(-1, completions[..., None]).squeeze(-1)
    (heard,) = calls
    emitted = heard.emissions([])
    assert [e.token_ids.tolist() for e in emitted] == completions.tolist()
    assert [e.context.tolist() for e in emitted] == [[1, 2, 3], [3, 2, 1]]
    told = np.stack([e.logp for e in emitted])
    np.testing.assert_allclose(told, expected.numpy(), rtol=0, atol=1e-6)


def test_a_copy_of_the_model_is_heard_and_nothing_stays_patched(lm):
    sample = GenerationMixin._sample
    copied = copy.deepcopy(lm)
    with record_generations() as calls:
        drawn(copied, do_sample=True)
    assert [call.model for call in calls] == [copied]
    assert GenerationMixin._sample is sample


def test_a_context_is_what_the_mask_lets_through_and_a_row_ends_with_its_end_token():
    heard = LogitsRecorder(None, torch.tensor([[0, 4], [3, 4]]), torch.tensor([[0, 1], [1, 1]]))
    heard.record_scores(torch.tensor([[0, 4], [3, 4]]), torch.zeros(2, 10))
    heard.record_scores(torch.tensor([[0, 4, 9], [3, 4, 5]]), torch.zeros(2, 10))
    heard.record_sequences(torch.tensor([[0, 4, 9, 0], [3, 4, 5, 6]]))
    one, other = heard.emissions([9])
    assert (one.context.tolist(), one.token_ids.tolist(), one.is_ended) == ([4], [9], True)
    assert (other.context.tolist(), other.token_ids.tolist()) == ([3, 4], [5, 6])
    assert not other.is_ended
    np.testing.assert_allclose(other.logp, -np.log([10, 10]), rtol=1e-6)


def test_a_softmax_that_was_made_is_not_made_again(lm, monkeypatch):
    again = []
    monkeypatch.setattr(sampled_logprobs, "cross_entropy", lambda *_, **__: again.append(1))
    with record_generations() as calls:
        drawn(lm, do_sample=True)
    assert calls[0].emissions([])[0].logp is not None
    assert not again


def test_a_coarse_softmax_is_not_trusted():
    heard = LogitsRecorder(None, torch.tensor([[0]]), None)
    scores = torch.tensor([[0.0, 3.0]])
    heard.record_scores(torch.tensor([[0]]), scores)
    heard.record_probs(torch.softmax(scores, dim=-1).bfloat16())
    heard.record_sequences(torch.tensor([[0, 0]]))
    (told,) = heard.emissions([])
    assert told.logp[0] == pytest.approx(float(log_softmax(scores, dim=-1)[0, 0]), abs=1e-6)


def test_another_softmax_is_not_taken_for_it():
    """Over another dimension, or of some of the outcomes."""
    prompts = torch.tensor([[0], [0]])
    heard = LogitsRecorder(None, prompts, None)
    scores = torch.tensor([[0.0, 3.0], [1.0, 1.0]])
    listened = sampled_logprobs.RecordingProcessorList(LogitsProcessorList(), heard)
    told = listened(prompts, scores)
    torch.nn.functional.softmax(told, dim=0)
    torch.nn.functional.softmax(told[:, :1], dim=-1)
    heard.record_sequences(torch.tensor([[0, 0], [0, 1]]))
    rows = [emission.logp for emission in heard.emissions([])]
    expected = log_softmax(scores, dim=-1)[[0, 1], [0, 1]]
    np.testing.assert_allclose(np.concatenate(rows), expected.numpy(), atol=1e-6)
