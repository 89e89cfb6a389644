"""The log-probs that are heard while `generate` draws, against its own scores."""

import numpy as np
import pytest
import torch
from torch.nn.functional import log_softmax

from integrations.trainers import save_start

pytest.importorskip("trl")

from transformers import AutoModelForCausalLM, LogitsProcessorList

from klinic.integrations.trl import sampled_logprobs
from klinic.integrations.trl.sampled_logprobs import record_logits

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
    with record_logits(lm) as heard:
        made = drawn(lm, **how)
    assert torch.equal(made.sequences, alone.sequences)
    completions = made.sequences[:, 3:]
    scores = torch.stack(alone.scores, dim=1).double()
    expected = log_softmax(scores, dim=-1).gather(-1, completions[..., None]).squeeze(-1)
    told = heard.completion_logp(completions.tolist())
    np.testing.assert_allclose(np.stack(told), expected.numpy(), rtol=0, atol=1e-6)


def test_a_softmax_that_was_made_is_not_made_again(lm, monkeypatch):
    again = []
    monkeypatch.setattr(sampled_logprobs, "cross_entropy", lambda *_, **__: again.append(1))
    with record_logits(lm) as heard:
        made = drawn(lm, do_sample=True)
    heard.completion_logp(made.sequences[:, 3:].tolist())
    assert not again


def test_a_coarse_softmax_is_not_trusted():
    heard = sampled_logprobs.LogitsRecorder()
    heard.begin_generation()
    scores = torch.tensor([[0.0, 3.0]])
    heard.record_scores(torch.tensor([[0]]), scores)
    heard.record_probs(torch.softmax(scores, dim=-1).bfloat16())
    (told,) = heard.completion_logp([[0]])
    assert told[0] == pytest.approx(float(log_softmax(scores, dim=-1)[0, 0]), abs=1e-6)


def test_another_softmax_is_not_taken_for_it():
    """Over another dimension, or of some of the outcomes."""
    heard = sampled_logprobs.LogitsRecorder()
    heard.begin_generation()
    scores = torch.tensor([[0.0, 3.0], [1.0, 1.0]])
    listened = sampled_logprobs.RecordingProcessorList(LogitsProcessorList(), heard)
    told = listened(torch.tensor([[0], [0]]), scores)
    torch.nn.functional.softmax(told, dim=0)
    torch.nn.functional.softmax(told[:, :1], dim=-1)
    rows = heard.completion_logp([[0], [1]])
    expected = log_softmax(scores, dim=-1)[[0, 1], [0, 1]]
    np.testing.assert_allclose(np.concatenate(rows), expected.numpy(), atol=1e-6)
