"""Log-probs whose gradient is made in place, and a head whose gradient is added up in place."""

import pytest
import torch
from torch import nn

from klinic.model.head import HeadGradient
from klinic.model.selected_logp import selected_logp


def logits_and_ids(n=5, vocabulary=7):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(n, vocabulary, generator=draw, dtype=torch.float64)
    return logits.requires_grad_(), torch.randint(vocabulary, (n,), generator=draw)


def test_the_gradient_is_the_derivative():
    logits, ids = logits_and_ids()
    log_softmax = torch.log_softmax(logits, -1)
    for pull in torch.eye(len(ids), dtype=torch.float64):
        seen, logp = selected_logp(logits, ids)
        assert torch.equal(seen, log_softmax)
        (expected,) = torch.autograd.grad(
            log_softmax[torch.arange(len(ids)), ids], logits, pull, retain_graph=True
        )
        (found,) = torch.autograd.grad(logp, logits, pull)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)


def test_an_outcome_that_cannot_be_drawn_has_no_gradient():
    logits, _ = logits_and_ids()
    masked = logits.detach().index_fill(1, torch.tensor([3]), -torch.inf).requires_grad_()
    _, logp = selected_logp(masked, torch.zeros(5, dtype=torch.int64))
    logp.sum().backward()
    assert torch.equal(masked.grad[:, 3], torch.zeros(5, dtype=torch.float64))
    assert masked.grad.isfinite().all()


def test_used_twice_it_says_so():
    logits, ids = logits_and_ids()
    _, logp = selected_logp(logits, ids)
    logp.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logp.sum().backward()


def test_sums_of_chunks_are_the_gradient_of_the_whole():
    torch.manual_seed(0)
    head = nn.Linear(4, 7, bias=False, dtype=torch.float64)
    hidden = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(9, 7, dtype=torch.float64)
    of_hidden, of_weight = torch.autograd.grad(head(hidden), [hidden, head.weight], pull)
    sums = HeadGradient(head.weight)
    parts = []
    for some in (slice(0, 4), slice(4, 8), slice(8, 9)):
        at = hidden[some].detach().requires_grad_()
        parts += torch.autograd.grad(sums.project_hidden(at), at, pull[some])
    torch.testing.assert_close(torch.cat(parts), of_hidden, rtol=0, atol=1e-12)
    torch.testing.assert_close(sums.grad, of_weight, rtol=0, atol=1e-12)
