"""The loss from hidden states: memory and time, beside full logits and TRL's chunked path.

A head of Qwen2.5-0.5B's size (vocabulary 151,936, width 896) on random hidden states; the loss is
the clipped surrogate with k3. Memory is the peak of a process of its own above what it held before
the loss, one process a figure. klinic's side is what its learner runs, entropy and rank included.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.harness import Claim, measure

VOCABULARY, WIDTH = 151_936, 896
KL_COEF = 0.04
MEMORY = {"frozen": 0.15, "trainable": 0.65}
TRL_CHUNK = 32_768  # TRL's own


class Given:
    """Hidden states, a head and what the loss compares with."""

    def __init__(self, tokens: int, head: str, vocabulary: int = VOCABULARY) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(tokens, WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)
        self.head.weight.requires_grad_(head == "trainable")
        self.target_ids = torch.randint(vocabulary, (tokens,))
        self.advantage = torch.randn(tokens)
        self.logp_old = torch.full((tokens,), -11.9)
        self.logp_ref = self.logp_old + 0.1 * torch.randn(tokens)

    def loss(self, logp: Tensor, tokens: slice = slice(None)) -> Tensor:
        """Return the sum over some tokens, divided by their number in all."""
        ratio = (logp - self.logp_old[tokens]).exp()
        advantage = self.advantage[tokens]
        policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        d = self.logp_ref[tokens] - logp
        return (policy + KL_COEF * (d.exp() - 1 - d)).sum() / len(self.target_ids)


def full(given: Given) -> Tensor:
    """Return the gradient in hidden states, by logits of all tokens."""
    hidden = given.hidden.clone().requires_grad_()
    logp = torch.log_softmax(given.head(hidden), -1).gather(-1, given.target_ids[:, None])[:, 0]
    torch.autograd.backward(given.loss(logp))
    return _taken(given, hidden)


def trl(given: Given) -> Tensor:
    """Return the same by TRL's chunked path, with the entropy that it logs."""
    from trl.kernels import ChunkedLogProbFunction

    hidden = given.hidden.clone().requires_grad_()
    logp, *_ = ChunkedLogProbFunction.apply(
        hidden, given.head.weight, None, given.target_ids, 1.0, TRL_CHUNK, None, 1.0, ("entropy",)
    )
    torch.autograd.backward(given.loss(logp))
    return _taken(given, hidden)


def klinic(given: Given) -> Tensor:
    """Return the same by what klinic's learner calls."""
    from klinic.model.layout import Layout

    hidden = given.hidden.clone().requires_grad_()
    scorer = _scorer(given, hidden)
    layout = Layout(
        input_ids=given.target_ids[None],
        position_ids=torch.arange(len(given.target_ids))[None],
        predict_at=torch.arange(len(given.target_ids)),
        target_ids=given.target_ids,
    )
    _, number = scorer.score_and_loss(
        layout, None, lambda scores, tokens: given.loss(scores.logp, tokens), token_by_token=True
    )
    torch.autograd.backward(number)
    return _taken(given, hidden)


def _scorer(given: Given, hidden: Tensor) -> Any:
    """Return klinic's scorer over the head; the hidden states are given."""
    from transformers import GPT2Config

    from klinic.model.scorer import TokenScorer

    class Headed(nn.Module):
        config = GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH)

        def get_output_embeddings(self) -> nn.Module:
            return given.head

    scorer = TokenScorer(Headed(), temperature=1.0)
    scorer.hidden = lambda _: hidden  # type: ignore[method-assign, assignment]
    return scorer


def _taken(given: Given, hidden: Tensor) -> Tensor:
    assert hidden.grad is not None  # noqa: S101 - just made
    if given.head.weight.grad is not None:
        given.head.weight.grad = None
    return hidden.grad


SIDES: dict[str, Callable[[Given], Tensor]] = {"full": full, "trl": trl, "klinic": klinic}


def peak(side: str, tokens: int, head: str) -> dict[str, Any]:
    """Return the peak of a process of its own in MB, and the gradient's norm and fingerprint."""
    told = subprocess.run(  # noqa: S603 - this very program
        [sys.executable, "-m", "bench.loss", side, str(tokens), head],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return found


def memory(*, tell: Callable[[str], None], **_: Any) -> dict[str, Any]:
    """Compare peaks; memory does not depend on who else is at work."""
    ratios: dict[str, Any] = {}
    raw = []
    for head, must in MEMORY.items():
        for tokens in (1024, 4096, 8192):
            at = {side: peak(side, tokens, head) for side in SIDES}
            raw.append({"tokens": tokens, "head": head, **at})
            over = at["klinic"]["mb"] / at["full"]["mb"]
            apart = abs(at["klinic"]["norm"] / at["full"]["norm"] - 1)
            fits = over <= must and at["klinic"]["mb"] <= at["trl"]["mb"] and apart <= 1e-5
            name = f"loss memory, {head} head, {tokens} tokens: klinic / full logits"
            ratios[name] = {
                "median": over,
                "must": must,
                "side": "at most",
                "ok": fits,
                "over_trl": at["klinic"]["mb"] / at["trl"]["mb"],
                "gradients_apart": apart,
            }
            tell(f"{name}: {over:.3f}, over TRL {ratios[name]['over_trl']:.3f}")
    return {"ratios": ratios, "raw": raw}


def seconds(*, tell: Callable[[str], None], **how: Any) -> dict[str, Any]:
    """Compare the time of a forward and a backward pass."""
    found: dict[str, Any] = {"ratios": {}, "raw": {}}
    for head in MEMORY:
        given = Given(512, head)
        arms = {side: partial(run, given) for side, run in SIDES.items()}
        claims = [
            Claim(
                name=f"loss time, {head} head: klinic / full logits",
                arm="klinic",
                over="full",
                must=1.10,
            ),
            Claim(name=f"loss time, {head} head: klinic / TRL", arm="klinic", over="trl", must=0.7),
        ]
        measured = measure(arms, claims, tell=tell, **how)
        found["ratios"] |= measured.pop("ratios")
        found["raw"][head] = measured
    return found


def _peak_here(side: str, tokens: int, head: str) -> None:
    torch.set_num_threads(1)
    given = Given(tokens, head)
    SIDES[side](Given(2, head, vocabulary=256))  # imports, and code that is loaded once
    Path("/proc/self/clear_refs").write_text("5")  # from here on the peak counts
    before = _resident("VmRSS")
    norm = float(SIDES[side](given).norm())
    print(json.dumps({"mb": _resident("VmHWM") - before, "norm": norm}))  # noqa: T201


def _resident(name: str) -> float:
    """Return what this process holds, or held at most, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1000 for line in lines if line.startswith(name))


if __name__ == "__main__":
    _peak_here(sys.argv[1], int(sys.argv[2]), sys.argv[3])
