"""The one log-prob function: every logp, logp_old and logp_ref of klinic comes from here.

At least fp32 log-softmax, one temperature, explicit positions, no dropout. The vocabulary is walked
through in chunks of tokens, and with gradients each chunk is recomputed in the backward pass, so
logits of all tokens never exist at once. Entropy, rank and, when a reference is given, the KL over
the whole vocabulary come from the same chunks.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from klinic.maths import kl
from klinic.maths.entropy import entropy
from klinic.model.head import Head
from klinic.model.layout import Layout

CHUNK_ELEMENTS = 2**25  # logits at a time: 128 MiB in fp32
TOP_K = 64  # outcomes that the estimator `topk` keeps apart; the rest share a bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """What a forward pass says about each completion token."""

    logp: Float[Tensor, "n"]
    entropy: Float[Tensor, "n"]
    rank: Int[Tensor, "n"]
    """How many outcomes are likelier than the token."""
    kl_exact: Float[Tensor, "n"] | None = None
    kl_topk: Float[Tensor, "n"] | None = None
    logp_ref: Float[Tensor, "n"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RefHidden:
    """The reference's hidden states at the same tokens, and its way from there to logits."""

    hidden: Float[Tensor, "m H"]
    logits: Callable[[Tensor], Tensor]
    tokens: Int[Tensor, "m"] | None = None
    """Which of the tokens these are; None for all of them."""

    def at(self, tokens: Int[Tensor, "k"]) -> "RefHidden":
        """Return the same for some of its tokens."""
        return replace(self, hidden=self.hidden[tokens], tokens=tokens)


class TokenScorer(nn.Module):
    """A causal LM as a function from rows to log-probs of their completion tokens."""

    def __init__(self, lm: Any, *, temperature: float, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.lm: Any = lm
        self.head = Head(lm)
        self.temperature = temperature
        self.autocast = autocast
        self.chunk_elements = CHUNK_ELEMENTS

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = next(self.lm.parameters()).device
        return device

    def decode(self, **inputs: Any) -> Any:
        """Run the decoder without its head, in the recipe's precision."""
        enabled = self.autocast is not None
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=enabled):
            return self.lm.get_decoder()(**inputs)

    def hidden(self, layout: Layout) -> Float[Tensor, "n H"]:
        """Return the hidden state that predicts each completion token."""
        output = self.decode(
            input_ids=layout.input_ids, position_ids=layout.position_ids, use_cache=False
        )
        states: Tensor = output.last_hidden_state
        return states.flatten(0, 1)[layout.predict_at]

    def forward(self, layout: Layout, reference: RefHidden | None = None) -> TokenScores:
        """Score the completion tokens; with a reference, also by the whole vocabulary.

        A reference that covers only some tokens is for looking, not for training: there
        `kl_exact` has no gradient, and it is NaN elsewhere.
        """
        hidden = self.hidden(layout)
        if reference is None or reference.tokens is None:
            return self.score(hidden, layout.target_ids, reference)
        scores = self.score(hidden, layout.target_ids)
        kl_exact = torch.full_like(scores.logp, torch.nan, requires_grad=False)
        with torch.no_grad():
            some = reference.tokens
            looked = self.score(hidden[some], layout.target_ids[some], reference)
            kl_exact[some] = _given(looked.kl_exact)
        return replace(scores, kl_exact=kl_exact)

    def score(
        self,
        hidden: Float[Tensor, "n H"],
        target_ids: Int[Tensor, "n"],
        reference: RefHidden | None = None,
    ) -> TokenScores:
        """Score tokens from their hidden states, a chunk at a time."""
        vocabulary = self.lm.get_output_embeddings().weight.shape[0]
        size = max(1, self.chunk_elements // vocabulary)
        tokens = torch.split(torch.arange(len(target_ids), device=hidden.device), size)
        # one chunk has nothing to free before the backward pass, so nothing to recompute
        again = torch.is_grad_enabled() and len(tokens) > 1
        parts = []
        for chunk in tokens:
            ref = None if reference is None else reference.at(chunk)
            arguments = (hidden[chunk], target_ids[chunk], ref)
            if again:
                parts.append(checkpoint(self._chunk, *arguments, use_reentrant=False))
            else:
                parts.append(self._chunk(*arguments))
        return _joined(parts)

    def logits(self, hidden: Float[Tensor, "n H"]) -> Float[Tensor, "n V"]:
        """Return the logits of hidden states, when asked from outside a forward pass."""
        logits: Tensor = self.head(hidden)
        return logits

    def log_softmax(self, logits: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """Return log-probs at the run's temperature."""
        return torch.log_softmax(logits / self.temperature, dim=-1)

    def _chunk(
        self, hidden: Tensor, target_ids: Tensor, reference: RefHidden | None
    ) -> TokenScores:
        logp_all = self.log_softmax(self.head(hidden))
        # a copy, no view: FSDP2 hangs its hook on what a forward returns
        logp = logp_all.gather(-1, target_ids[:, None])[:, 0].clone()
        with torch.no_grad():
            undecided = entropy(logp_all)
            rank = (logp_all > logp[:, None]).sum(-1)
        if reference is None:
            return TokenScores(logp=logp, entropy=undecided, rank=rank)
        with torch.no_grad():
            ref_all = self.log_softmax(reference.logits(reference.hidden))
        both = {"logp_p": logp_all, "logp_q": ref_all}
        return TokenScores(
            logp=logp,
            entropy=undecided,
            rank=rank,
            kl_exact=kl.exact(**both),
            kl_topk=kl.topk(**both, k=min(TOP_K, logp_all.shape[-1] - 1)),
            logp_ref=ref_all.gather(-1, target_ids[:, None])[:, 0],
        )


def _given(values: Tensor | None) -> Tensor:
    assert values is not None  # noqa: S101 - a reference was given
    return values


def _joined(parts: list[TokenScores]) -> TokenScores:
    if len(parts) == 1:
        return parts[0]
    columns: dict[str, Any] = {}
    for field in fields(TokenScores):
        values = [getattr(part, field.name) for part in parts]
        columns[field.name] = None if values[0] is None else torch.cat(values)
    return TokenScores(**columns)
