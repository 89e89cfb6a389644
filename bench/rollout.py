"""Rollouts with klinic's own sampler against `generate` of transformers: useful tokens per second.

Eight prompts, eight completions each, all 64 in one batch on both sides. Where a completion ends is
drawn log-normal beforehand, so that both make the same number of useful tokens: klinic by the room
of a stream, `generate` by a stopping criterion. Random weights, temperature 1, no end tokens. Only
klinic also returns the log-prob of every token.

Then both decode greedily, and rows that differ are counted: by a near tie, or without one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

from bench.harness import Claim, measure
from klinic.model.dropout import disable_dropout
from klinic.model.scorer import TokenScorer
from klinic.model.tiny import tiny_model, tiny_tokenizer
from klinic.sampler.decoding import Stream, decode
from klinic.sampler.random_streams import uniforms
from klinic.sampler.token_sampling import SamplingParams

PROMPTS, GROUP = 8, 8
SIGMA = 0.6  # of the log of a length: 64 of them fill 37% of a batch as long as the longest
GAP = 1e-4  # between the two largest logits, below which kernels may disagree on the likeliest
PAD = 0


def _llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8192,
            hidden_size=288,
            intermediate_size=768,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=6,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            initializer_range=0.06,
        )
    )


def _gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config())


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model, and how long its completions may get."""

    make: Callable[[], Any]
    longest: int


SIZES = {
    "tiny": Size(make=lambda: tiny_model(tiny_tokenizer(), seed=0), longest=128),
    "10m": Size(make=_llama, longest=128),
    "124m": Size(make=_gpt2, longest=64),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What both sides are asked: contexts, and where each completion ends."""

    lm: Any
    contexts: list[np.ndarray]
    lengths: np.ndarray

    @property
    def num_useful(self) -> int:
        """Tokens that both sides hand out."""
        return int(self.lengths.sum())

    @property
    def share(self) -> float:
        """How much of a batch as long as its longest completion is useful."""
        return float(self.lengths.mean() / self.lengths.max())


def case_of(name: str, seed: int = 0) -> Case:
    """Return a model with random weights, prompts of 16 to 64 tokens, and log-normal lengths."""
    size = SIZES[name]
    torch.manual_seed(seed)
    lm = size.make().float().eval()
    disable_dropout(lm)
    stream = np.random.default_rng(seed)
    vocabulary = int(lm.get_output_embeddings().weight.shape[0])
    prompts = [stream.integers(1, vocabulary, n) for n in stream.integers(16, 65, PROMPTS)]
    drawn = stream.lognormal(0.0, SIGMA, PROMPTS * GROUP)
    lengths = np.maximum(1, np.rint(drawn / drawn.max() * size.longest)).astype(int)
    return Case(lm=lm, contexts=[p for p in prompts for _ in range(GROUP)], lengths=lengths)


def klinic_side(case: Case, *, temperature: float = 1.0) -> Callable[[], list[list[int]]]:
    """Return what makes the completions with klinic's sampler."""
    scorer = TokenScorer(case.lm, temperature=1.0)
    asked = list(zip(case.contexts, case.lengths.tolist(), strict=True))

    def run() -> list[list[int]]:
        streams = [
            Stream(
                context=context,
                uniforms=uniforms(seed=0, step=0, prompt=i // GROUP, sample=i % GROUP, num=length),
            )
            for i, (context, length) in enumerate(asked)
        ]
        how = SamplingParams(temperature=temperature)
        for _ in decode(scorer, streams, params=how, eos_ids=frozenset(), pad_id=PAD):
            pass
        return [stream.token_ids for stream in streams]

    return run


class Ends(StoppingCriteria):  # type: ignore[misc]
    """Ends each row at its own length."""

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths

    def __call__(self, input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return which rows have got their length."""
        return input_ids.shape[1] >= self.lengths


def generate_side(case: Case, *, temperature: float = 1.0) -> Callable[[], list[list[int]]]:
    """Return what makes the completions with `generate`."""
    longest = max(len(context) for context in case.contexts)
    ids = torch.full((len(case.contexts), longest), PAD)
    mask = torch.zeros_like(ids)
    for row, context in enumerate(case.contexts):
        ids[row, longest - len(context) :] = torch.from_numpy(context)
        mask[row, longest - len(context) :] = 1
    ends = Ends(torch.from_numpy(case.lengths) + longest)
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}

    def run() -> list[list[int]]:
        made = case.lm.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=int(case.lengths.max()),
            stopping_criteria=StoppingCriteriaList([ends]),
            pad_token_id=PAD,
            eos_token_id=None,
            **({"do_sample": False} | how),
        )[:, longest:]
        return [row[:length].tolist() for row, length in zip(made, case.lengths, strict=True)]

    return run


def compared(case: Case) -> dict[str, int]:
    """Count rows whose greedy tokens are `generate`'s, and those that a near tie explains."""
    ours, theirs = (side(case, temperature=0.0)() for side in (klinic_side, generate_side))
    told = {"rows": len(ours), "equal": 0, "near tie": 0, "different": 0}
    for context, one, other in zip(case.contexts, ours, theirs, strict=True):
        if one == other:
            told["equal"] += 1
            continue
        at = next(i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
        with torch.no_grad():
            logits = case.lm(torch.tensor([[*context, *one[:at]]])).logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        told["near tie" if first - second < GAP else "different"] += 1
    return told


def rollout(*, tell: Callable[[str], None], **how: Any) -> dict[str, Any]:
    """Compare useful tokens a second, and count greedy tokens that differ."""
    found: dict[str, Any] = {"ratios": {}, "raw": {}}
    for name in SIZES:
        case = case_of(name)
        arms = {"generate": generate_side(case), "klinic": klinic_side(case)}
        claim = Claim(
            name=f"rollout {name}: useful tokens a second, klinic / generate",
            arm="klinic",
            over="generate",
            must=1.3,
            side="at least",
            inverted=True,
        )
        measured = measure(arms, [claim], tell=tell, **how)
        told = compared(case)
        (ratio,) = measured["ratios"].values()
        ratio["ok"] = ratio["ok"] and told["different"] == 0
        tell(f"greedy: {told}")
        found["ratios"] |= measured.pop("ratios")
        facts = {"useful_tokens": case.num_useful, "useful_share": case.share, "greedy": told}
        found["raw"][name] = measured | facts
    return found
