"""The one log-prob function: every logp, logp_old and logp_ref of klinic is computed here.

Log-softmax in at least fp32, one temperature, the sampler's filters (token_filters.py), explicit
positions, no dropout. The logits are computed for a chunk of tokens at a time and never exist for
all tokens at once: `score_and_loss` computes the gradient of each chunk immediately (fused.py),
`forward` with gradients recomputes the chunk in the backward pass. Entropy, rank and, with a
reference, the KL over the full vocabulary come from the same chunks.

`supports_packing` decides whether a model may score packed rows. Packing pays off only with flash
or flex attention, which handle rows of any length without padding; others materialise the mask
between rows. Most transformers models detect row boundaries by decreasing positions. Some do not,
and then a row's log-probs silently depend on the row before it, so support is tested on two rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from klinic.maths import kl
from klinic.maths.arrays import top_k_indices
from klinic.maths.entropy import entropy
from klinic.model.attention import PACKED_KERNELS, fp32_attention
from klinic.model.fused import ChunkLoss, fused_loss
from klinic.model.head import Head, HeadGradient
from klinic.model.layout import Layout, TokenTargets, pack_rows
from klinic.model.selected_logp import selected_logp
from klinic.model.token_filters import KeptTokens, TokenFilters, filter_mask
from klinic.model.token_scores import TokenScores, concat_scores

CHUNK_ELEMENTS = 27 * 2**20  # logits per chunk: 108 MiB in fp32
CHUNK_ROWS = 16  # a chunk's tokens are a multiple of it, which suits matrix kernels
BLOCK_ELEMENTS = 2**18  # log-probs per block: 1 MiB, which fits in the cache
TOP_K = 64  # tokens that the estimator `topk` treats separately; the rest share a bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class RefTop:
    """The reference's log-probs at the policy's most likely tokens when the step was scored."""

    token_ids: Int[Tensor, "n K"]
    logp: Float[Tensor, "n K+1"]
    """Of those tokens, and of all others together."""

    def slice_tokens(self, tokens: slice) -> "RefTop":
        """Return the entries of a slice of tokens."""
        return RefTop(token_ids=self.token_ids[tokens], logp=self.logp[tokens])


@dataclass(frozen=True, slots=True, kw_only=True)
class RefHidden:
    """Hidden states of reference or teacher at the completion tokens; the function to logits."""

    hidden: Float[Tensor, "m H"]
    logits: Callable[[Tensor], Tensor]
    tokens: Int[np.ndarray, "m"] | None = None
    """Sorted indices of the tokens it covers; None for all of them."""
    token_indices: Int[Tensor, "m"] | None = None
    """`tokens` on the device: a copy for every chunk would make the host wait."""
    topk: bool = False
    """Whether to compute the top-k KL in addition to the exact one."""
    top: RefTop | None = None
    """Log-probs stored for all tokens, so that the top-k KL needs no further reference pass."""

    @property
    def needs_all_logp(self) -> bool:
        """Whether its KL needs the policy's log-probs of the whole vocabulary at every token."""
        return self.tokens is None or self.top is not None

    def select_tokens(self, tokens: Int[np.ndarray, "k"]) -> "RefHidden":
        """Return the entries of selected tokens."""
        indices = torch.from_numpy(tokens).to(self.hidden.device)
        return replace(self, hidden=self.hidden[indices], tokens=tokens, token_indices=indices)

    def slice_tokens(self, tokens: slice) -> "RefHidden":
        """Return the entries of a slice of tokens, with indices relative to its start."""
        top = None if self.top is None else self.top.slice_tokens(tokens)
        if self.tokens is None:
            return replace(self, hidden=self.hidden[tokens], top=top)
        start, stop = np.searchsorted(self.tokens, [tokens.start, tokens.stop])
        assert self.token_indices is not None  # noqa: S101 - set with `tokens`
        return replace(
            self,
            hidden=self.hidden[start:stop],
            tokens=self.tokens[start:stop] - tokens.start,
            token_indices=self.token_indices[start:stop] - tokens.start,
            top=top,
        )


ReferenceAndTeacher = tuple[RefHidden | None, RefHidden | None]


class TokenScorer(nn.Module):
    """Maps rows to the log-probs of their completion tokens with a causal LM."""

    def __init__(
        self,
        lm: Any,
        *,
        temperature: float,
        autocast: torch.dtype | None = None,
        bf16_head: bool = False,
    ) -> None:
        super().__init__()
        self.lm: Any = lm
        self.head = Head(lm, in_bf16=bf16_head)
        self.temperature = temperature
        self.autocast = autocast
        self.chunk_elements = CHUNK_ELEMENTS

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        device: torch.device = next(self.lm.parameters()).device
        return device

    def decode(self, **inputs: Any) -> Any:
        """Run the decoder without its head, for a call from outside a forward pass."""
        return self._run_decoder(**inputs)

    def _run_decoder(self, **inputs: Any) -> Any:
        """Run the decoder without its head, in the recipe's precision."""
        # a pass casts each weight once; a cache would hold the casts of all weights until its end,
        # whole ones on every rank of a sharded model
        precision = torch.autocast(
            self.device.type,
            dtype=self.autocast,
            enabled=self.autocast is not None,
            cache_enabled=False,
        )
        with precision:
            return self.lm.get_decoder()(**inputs)

    def hidden(self, layout: Layout) -> Float[Tensor, "n H"]:
        """Return the hidden state that predicts each completion token."""
        output = self._run_decoder(
            input_ids=layout.input_ids, position_ids=layout.position_ids, use_cache=False
        )
        states: Tensor = output.last_hidden_state
        return states.flatten(0, 1)[layout.predict_at]

    def forward(
        self,
        layout: Layout,
        reference: RefHidden | None = None,
        teacher: RefHidden | None = None,
    ) -> TokenScores:
        """Score the completion tokens; with a reference or teacher, also over the full vocabulary.

        A reference that covers only some tokens is for diagnostics, not training: `kl_exact` then
        has no gradient and is NaN at the other tokens.
        """
        return self.score(self.hidden(layout), layout.targets, reference, teacher)

    def score_and_loss(
        self,
        layout: Layout,
        reference: RefHidden | None,
        loss: ChunkLoss,
        *,
        token_by_token: bool,
        teacher: RefHidden | None = None,
    ) -> tuple[TokenScores, Float[Tensor, ""]]:
        """Return the scores, and the loss with its precomputed gradient.

        `token_by_token` asserts that no token's loss depends on another token.
        """
        hidden, head_gradient = self.hidden(layout), self.head.new_gradient()

        def score_chunk(some: Tensor, tokens: slice) -> TokenScores:
            frozen = _slice_both(reference, teacher, tokens)
            targets = layout.targets.slice_tokens(tokens)
            return self._score_chunk(some, targets, frozen, head_gradient)

        return fused_loss(
            hidden,
            self.head.trainable_weights if head_gradient is None else head_gradient,
            score_chunk,
            loss,
            chunks=self.token_chunks(len(hidden)),
            token_by_token=token_by_token,
        )

    def score(
        self,
        hidden: Float[Tensor, "n H"],
        targets: TokenTargets,
        reference: RefHidden | None = None,
        teacher: RefHidden | None = None,
    ) -> TokenScores:
        """Score tokens from their hidden states, in chunks."""
        chunks = self.token_chunks(len(targets.ids))
        # a single chunk frees nothing before the backward pass, so recomputing saves nothing
        recompute = torch.is_grad_enabled() and len(chunks) > 1
        parts = []
        for chunk in chunks:
            frozen = _slice_both(reference, teacher, chunk)
            arguments = (hidden[chunk], targets.slice_tokens(chunk), frozen)
            if recompute:
                parts.append(checkpoint(self._score_chunk, *arguments, use_reentrant=False))
            else:
                parts.append(self._score_chunk(*arguments))
        return concat_scores(parts)

    @torch.no_grad()
    def logp(self, hidden: Float[Tensor, "n H"], targets: TokenTargets) -> Float[Tensor, "n"]:
        """Return the log-probs alone, bitwise equal to those of `score`."""

        def chunk_logp(some: slice) -> Tensor:
            chunk = targets.slice_tokens(some)
            logits = chunk.restrict_logits(self._scale_logits(self.head(hidden[some])))
            return selected_logp(logits, chunk.ids)[1]

        return torch.cat([chunk_logp(some) for some in self.token_chunks(len(targets.ids))])

    @torch.no_grad()
    def logits_of_head_and_model(
        self, layout: Layout
    ) -> tuple[Float[Tensor, "n V"], Float[Tensor, "n V"]]:
        """Return klinic's logits of the completion tokens and the model's own, both in fp32."""
        with torch.autocast(self.device.type, enabled=False), fp32_attention(self.lm):
            plain = TokenScorer(self.lm, temperature=self.temperature)
            output = self.lm(input_ids=layout.input_ids, position_ids=layout.position_ids)
            of_head: Tensor = plain.head(plain.hidden(layout))
        return of_head, output.logits.flatten(0, 1)[layout.predict_at].float()

    @torch.no_grad()
    def kept_tokens(self, layout: Layout, filters: TokenFilters) -> KeptTokens:
        """Return the tokens that pass the filters, and the sampled token, at every position.

        A sampler with other rounding can return a token at the edge of the set found here.
        """
        hidden = self.hidden(layout)

        def kept_mask(chunk: slice) -> Tensor:
            keep = filter_mask(self.log_softmax(self.head(hidden[chunk])), filters)
            return keep.scatter_(-1, layout.target_ids[chunk, None], value=True)

        return KeptTokens.from_masks(kept_mask(some) for some in self.token_chunks(len(hidden)))

    @torch.no_grad()
    def reference_top_k(
        self, hidden: Float[Tensor, "n H"], targets: TokenTargets, reference: RefHidden
    ) -> RefTop:
        """Return the reference's log-probs at the policy's most likely tokens, in chunks."""
        token_ids, logp = [], []
        for chunk in self.token_chunks(len(hidden)):
            restrict = targets.slice_tokens(chunk).restrict_logits
            logp_all = self.log_softmax(restrict(self.head(hidden[chunk])))
            ref_all = self.log_softmax(restrict(reference.logits(reference.hidden[chunk])))
            token_ids.append(top_k_indices(logp_all, _num_top_tokens(logp_all)))
            logp.append(kl.coarse_logp(logp=ref_all, token_ids=token_ids[-1]))
        return RefTop(token_ids=torch.cat(token_ids), logp=torch.cat(logp))

    def token_chunks(self, num_tokens: int) -> list[slice]:
        """Return the slices of tokens whose logits are computed at a time."""
        vocabulary = self.lm.get_output_embeddings().weight.shape[0]
        size = max(1, self.chunk_elements // vocabulary)
        size -= size % CHUNK_ROWS if size > CHUNK_ROWS else 0
        starts = range(0, max(num_tokens, 1), size)
        return [slice(start, min(start + size, num_tokens)) for start in starts]

    def logits_of(self, hidden: Float[Tensor, "n H"]) -> Float[Tensor, "n V"]:
        """Return the logits of hidden states, for calls from outside a forward pass."""
        logits: Tensor = self.head(hidden)
        return logits

    def log_softmax(self, logits: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """Return log-probs at the run's temperature."""
        return torch.log_softmax(self._scale_logits(logits), dim=-1)

    def _scale_logits(self, logits: Tensor) -> Tensor:
        return logits if self.temperature == 1 else logits / self.temperature

    def _score_chunk(
        self,
        hidden: Tensor,
        targets: TokenTargets,
        frozen: ReferenceAndTeacher,
        head_gradient: HeadGradient | None = None,
    ) -> TokenScores:
        reference, teacher = frozen
        logits = targets.restrict_logits(self._scale_logits(self.head(hidden, head_gradient)))
        logp_vocab, logp = selected_logp(logits, targets.ids)
        rows = self._rows_per_block(logp_vocab)
        scores = TokenScores(logp=logp, **_entropy_and_rank(logp_vocab, logp.detach(), rows))
        logp_all: Tensor | None = None
        if any(m is not None and m.needs_all_logp for m in (reference, teacher)):
            # separate from `logp`, whose gradient must be bitwise independent of the KL
            logp_all = torch.log_softmax(logits, dim=-1)
        if reference is not None:
            to_reference = self._vocabulary_kl(hidden, targets, reference, logp_all)
            scores = replace(scores, kl_exact=to_reference[0], kl_topk=to_reference[1])
        if teacher is not None:
            to_teacher = self._vocabulary_kl(hidden, targets, teacher, logp_all)
            scores = replace(scores, teacher_kl_exact=to_teacher[0], teacher_kl_topk=to_teacher[1])
        return scores

    def _vocabulary_kl(
        self, hidden: Tensor, targets: TokenTargets, frozen: RefHidden, logp_all: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the exact and the top-k KL to a frozen model, which carries no gradient."""
        kl_topk: Tensor | None = None
        if (top := frozen.top) is not None:
            stored = {"coarse_q": top.logp, "token_ids": top.token_ids}
            kl_topk = kl.bucketed_kl(logp_p=logp_all, **stored)
        if frozen.tokens is not None:
            return self._kl_at_tokens(hidden, targets, frozen), kl_topk
        assert logp_all is not None  # noqa: S101 - computed for every model that covers all tokens
        with torch.no_grad():
            frozen_all = self.log_softmax(targets.restrict_logits(frozen.logits(frozen.hidden)))
        both = {"logp_p": logp_all, "logp_q": frozen_all}
        if frozen.topk:
            kl_topk = kl.topk(**both, k=_num_top_tokens(logp_all))
        return kl.exact(**both), kl_topk

    def _rows_per_block(self, logp_all: Tensor) -> int:
        """Return the rows that entropy and rank take at a time: on a CPU those of its cache."""
        if logp_all.device.type != "cpu":
            return max(1, len(logp_all))
        return max(1, BLOCK_ELEMENTS // logp_all.shape[-1])

    @torch.no_grad()
    def _kl_at_tokens(self, hidden: Tensor, targets: TokenTargets, reference: RefHidden) -> Tensor:
        """Return the exact KL at the reference's tokens and NaN at the others, without gradient."""
        tokens = reference.token_indices
        assert tokens is not None  # noqa: S101 - set with `tokens`
        ref_logits = reference.logits(reference.hidden)
        ref_all = self.log_softmax(targets.restrict_logits(ref_logits, tokens))
        # separate logits, in the shape of the reference's: equal policies differ by exactly 0
        policy_logits = self.head(hidden[tokens])
        logp_some = self.log_softmax(targets.restrict_logits(policy_logits, tokens))
        kl_exact = ref_all.new_full((len(hidden),), torch.nan)
        kl_exact[tokens] = kl.exact(logp_p=logp_some, logp_q=ref_all)
        return kl_exact


def _slice_both(
    reference: RefHidden | None, teacher: RefHidden | None, tokens: slice
) -> ReferenceAndTeacher:
    """Return the entries of a slice of tokens of each."""
    return (
        None if reference is None else reference.slice_tokens(tokens),
        None if teacher is None else teacher.slice_tokens(tokens),
    )


def _num_top_tokens(logp_all: Tensor) -> int:
    return min(TOP_K, logp_all.shape[-1] - 1)


@torch.no_grad()
def _entropy_and_rank(logp_all: Tensor, logp: Tensor, rows: int) -> dict[str, Tensor]:
    """Return entropy and rank, in blocks of `rows` rows."""
    entropies, rank = torch.empty_like(logp), torch.empty_like(logp)
    likelier = torch.empty_like(logp_all[:rows])
    for start in range(0, len(logp), rows):
        some = slice(start, start + rows)
        entropies[some] = entropy(logp_all[some])
        # float zeros and ones take a third of the time; their sum is exact below 2**24
        into = likelier[: len(entropies[some])]
        rank[some] = torch.gt(logp_all[some], logp[some, None], out=into).sum(-1)
    return {"entropy": entropies, "rank": rank.long()}


TEST_ROW_LENGTH = 8
PACKING_TOLERANCE = 0.02  # relative to a hidden state; bf16 rounding reaches 0.01


def supports_packing(scorer: TokenScorer) -> bool:
    """Whether a model's kernel needs no padding and keeps packed rows independent."""
    attention = str(scorer.lm.config._attn_implementation)
    skips_rows = attention.startswith("flash_attention") or attention in PACKED_KERNELS
    return skips_rows and keeps_rows_independent(scorer)


@torch.no_grad()
def keeps_rows_independent(scorer: TokenScorer) -> bool:
    """Whether a row packed after another scores as if alone, independent of the other's tokens."""
    ids = np.arange(4 * TEST_ROW_LENGTH) % scorer.lm.get_output_embeddings().weight.shape[0]
    one, other, row = np.split(ids, [TEST_ROW_LENGTH, 2 * TEST_ROW_LENGTH])

    def hidden_of_last_row(*rows: np.ndarray) -> torch.Tensor:
        starts, rest = [row[:1] for row in rows], [row[1:] for row in rows]
        states = scorer.hidden(pack_rows(starts, rest, device=scorer.device))
        return states[-len(row) + 1 :].double()

    alone, packed = hidden_of_last_row(row), hidden_of_last_row(one, row)
    relative_difference = float((packed - alone).norm() / alone.norm())
    # masked entries are multiplied by exactly 0, hence `equal`
    return (
        torch.equal(packed, hidden_of_last_row(other, row))
        and relative_difference < PACKING_TOLERANCE
    )
