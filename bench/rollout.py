"""Rollouts with klinic's own sampler against `generate` of transformers: useful tokens per second.

    python -m bench.rollout [--sizes tiny,10m,124m] [--pairs 7] [--json]

Eight prompts, eight completions each, all 64 in one batch on both sides. Where a completion ends is
drawn log-normal beforehand, so that both make the same number of useful tokens: klinic by the room
of a stream, `generate` by a stopping criterion. Random weights, temperature 1, no end tokens. Only
klinic also returns the log-prob of every token.

Pairs come in the order A B B A, with A against A as control; wall and CPU seconds of one thread.
Then both decode greedily, and rows that differ are counted: by a near tie, or without one.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

from klinic.model.dropout import silence_dropout
from klinic.model.scorer import TokenScorer
from klinic.model.tiny import tiny_model, tiny_tokenizer
from klinic.sampler.decoding import Stream, decode
from klinic.sampler.drawing import Drawing
from klinic.sampler.random_streams import uniforms

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
    silence_dropout(lm)
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
        how = Drawing(temperature=temperature)
        for _ in decode(scorer, streams, how=how, eos_ids=frozenset(), pad_id=PAD):
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


def _timed(run: Callable[[], Any]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def ratios(a: Callable[[], Any], b: Callable[[], Any], pairs: int) -> dict[str, Any]:
    """Return seconds of `b` over seconds of `a`, pair by pair, in the order A B B A."""
    _timed(a), _timed(b)
    rows = []
    for number in range(pairs):
        order = (a, b) if number % 2 == 0 else (b, a)
        first, second = (_timed(run) for run in order)
        one, other = (first, second) if number % 2 == 0 else (second, first)
        rows.append((one, other))
    return {
        kind: {
            "ratio": statistics.median(o[k] / m[k] for m, o in rows),
            "all": [round(o[k] / m[k], 3) for m, o in rows],
            "a_seconds": statistics.median(m[k] for m, _ in rows),
            "b_seconds": statistics.median(o[k] for _, o in rows),
        }
        for k, kind in enumerate(("wall", "cpu"))
    }


def main() -> None:
    """Print, for each size, how much faster klinic is, the control, and whose tokens are equal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(soft_wrap=True)
    for name in arguments.sizes.split(","):
        case = case_of(name)
        klinic = klinic_side(case)
        told = {
            "size": name,
            "parameters": sum(p.numel() for p in case.lm.parameters()),
            "useful_tokens": case.num_useful,
            "useful_share": round(case.share, 3),
            "faster": ratios(klinic, generate_side(case), arguments.pairs),
            "control": ratios(klinic, klinic, arguments.pairs),
            "greedy": compared(case),
        }
        if arguments.json:
            console.print_json(json.dumps(told))
            continue
        console.print(
            f"{name}: {told['parameters'] / 1e6:.1f}M, {case.num_useful} tokens, "
            f"{case.share:.0%} useful: "
            + ", ".join(
                f"{kind} {told['faster'][kind]['ratio']:.2f} "
                f"(control {told['control'][kind]['ratio']:.2f}, klinic "
                f"{case.num_useful / told['faster'][kind]['a_seconds']:.0f} tokens/s)"
                for kind in ("wall", "cpu")
            )
            + f"; greedy {told['greedy']}"
        )


if __name__ == "__main__":
    main()
