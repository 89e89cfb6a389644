"""`python -m bench.leader_cost [TOKENS]`: processor time of the first process per million tokens.

Synthetic completions of a step of several ranks pass through each stage. The work of the first
process grows with the tokens of the step; that of a rank, which the first one is too, with the
tokens of its own rows. Every round runs all stages twice, interleaved, so that the ratio of the two
sides shows what the machine does to a ratio of 1. Decoding completions to text, rewards, checks and
writing are not included.
"""

import gc
import itertools
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.console import Console

from klinic.evidence.measures import ClipRange
from klinic.evidence.metrics import row_metrics, token_metrics
from klinic.evidence.record import EmittedBy, StepRecord, first_rows, select_rows
from klinic.evidence.rollout import Prompt, Rollout, Segment, flatten_rollouts
from klinic.evidence.step_sample import num_sampled_rows
from klinic.learner.packing import lay_out_batches, split_rows
from klinic.learner.row_shares import decode_share, encode_share, share_of_rank
from klinic.learner.step_results import finite_at, loss_denominator
from klinic.sampler.vllm.outputs import to_output

NUM_RANKS = 8
GROUP = 8
PROMPT_TOKENS = 128
MEAN_LENGTH = 1024
ROUNDS = 7
ANSWERS_FRACTION = 0.05
"""Fraction of the completions that are converted from vLLM's outputs: objects for each token."""
EVERY_TOOL_ROW = 8
"""One completion in so many has a reply of a tool in its middle, which is not trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage, and the number of tokens that its time is divided by."""

    run: Callable[[], Any]
    num_tokens: int
    of: str = "first process"
    """Whose work it is: the first process works on all tokens, a rank on those of its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Processor time of a stage in ms per million tokens, and the ratio of its two sides."""

    ms: float
    control: float
    of: str


def make_rollouts(num_tokens: int, rng: np.random.Generator) -> list[Rollout]:
    """Return synthetic completions of at least `num_tokens` tokens, in groups."""
    rollouts: list[Rollout] = []
    total = 0
    while total < num_tokens:
        prompt = Prompt(
            index=len(rollouts) // GROUP,
            text="",
            token_ids=rng.integers(0, 100_000, PROMPT_TOKENS),
            columns={},
        )
        for sample in range(GROUP):
            length = int(rng.integers(MEAN_LENGTH // 2, MEAN_LENGTH * 3 // 2))
            is_tool_row = len(rollouts) % EVERY_TOOL_ROW == 0
            rollouts.append(_make_rollout(prompt, sample, length, is_tool_row, rng))
            total += length
    return rollouts


def _make_rollout(
    prompt: Prompt, sample: int, length: int, is_tool_row: bool, rng: np.random.Generator
) -> Rollout:
    bounds = [0, length // 3, length // 2, length] if is_tool_row else [0, length]
    segments = []
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        is_policy = number != 1
        logp = -rng.exponential(0.5, end - start).astype(np.float32)
        segments.append(
            Segment(
                token_ids=rng.integers(0, 100_000, end - start),
                emitted_by=EmittedBy.POLICY if is_policy else EmittedBy.TOOL,
                logp_sampler=logp if is_policy else None,
                weight_version=3,
            )
        )
    return Rollout(
        prompt=prompt,
        sample=sample,
        segments=tuple(segments),
        finish_reason="stop",
        text="",
        sent_prompt_ids=prompt.token_ids,
        cached_tokens=0,
    )


def score_record(record: StepRecord, rng: np.random.Generator) -> StepRecord:
    """Return the record with synthetic log-probs of learner and reference, and rewards."""
    assert record.logp_sampler is not None and record.sample is not None  # noqa: S101, PT018
    num = record.num_tokens
    sampled = np.nan_to_num(record.logp_sampler, nan=-1.0)
    logp = sampled + rng.normal(0, 0.01, num).astype(np.float32)
    logp_ref = logp + rng.normal(0, 0.2, num).astype(np.float32)
    is_first = np.repeat(record.sample == 0, np.diff(record.row_offsets))
    return replace(
        record,
        logp=logp,
        logp_old=logp,
        logp_ref=logp_ref,
        entropy=-logp,
        rank=rng.integers(0, 50, num),
        kl_exact=np.where(is_first, np.square(logp - logp_ref), np.nan).astype(np.float32),
        reward=rng.random(record.num_rows),
        advantage=rng.normal(size=record.num_rows),
    )


def make_answers(rollouts: list[Rollout]) -> list[Any]:
    """Return objects with the attributes of vLLM's outputs, one per completion."""
    answers = []
    for rollout in rollouts:
        ids = rollout.token_ids.tolist()
        positions = list(range(len(ids)))
        flat = SimpleNamespace(
            start_indices=positions,
            end_indices=[*positions[1:], len(ids)],
            token_ids=list(ids),
            logprobs=(-0.001 * rollout.token_ids).tolist(),
        )
        completion = SimpleNamespace(token_ids=ids, logprobs=flat, finish_reason="stop")
        answers.append(
            SimpleNamespace(
                outputs=[completion],
                prompt_token_ids=rollout.prompt.token_ids.tolist(),
                num_cached_tokens=0,
            )
        )
    return answers


def convert_answers(answers: list[Any]) -> list[Segment]:
    """Convert vLLM's outputs to segments, as `append_turn` does, without decoding them."""
    outputs = [to_output(answer) for answer in answers]
    return [
        Segment(
            token_ids=output.token_ids,
            emitted_by=EmittedBy.POLICY,
            logp_sampler=output.logp,
            weight_version=0,
        )
        for output in outputs
    ]


def send_rows(record: StepRecord) -> int:
    """Do what the first process does to send every other rank its rows; return their bytes."""
    row_sets = split_rows(record, size=8, num_ranks=NUM_RANKS)
    return sum(
        len(encode_share(share_of_rank(record, row_sets, rank=rank, num_ranks=NUM_RANKS)))
        for rank in range(1, NUM_RANKS)
    )


def make_stages(num_tokens: int) -> dict[str, Stage]:
    """Return the stages by name."""
    rng = np.random.default_rng(0)
    rollouts = make_rollouts(num_tokens, rng)
    flat = flatten_rollouts(rollouts, step=1)
    record = score_record(flat, rng)
    few = rollouts[: max(1, round(ANSWERS_FRACTION * len(rollouts)))]
    answers, pickled = make_answers(few), pickle.dumps(rollouts, protocol=5)
    row_sets = split_rows(flat, size=8, num_ranks=NUM_RANKS)
    share = share_of_rank(flat, row_sets, rank=1, num_ranks=NUM_RANKS)
    packed, own = encode_share(share), select_rows(record, share.rows.tolist())
    weights = np.where(own.loss_mask, np.float32(1e-6), np.float32(0))
    cpu = torch.device("cpu")

    def check_results() -> None:
        finite_at(own, loss=0.0, grad_norm=1.0)
        loss_denominator(weights)

    clip = ClipRange(low=0.2, high=0.2)
    leader = {
        "unpickle": lambda: pickle.loads(pickled),  # noqa: S301 - made above
        "flatten": lambda: flatten_rollouts(rollouts, step=1),
        "rows of the other ranks": lambda: send_rows(flat),
        "metrics of rows": lambda: row_metrics(record),
        "sample for the doctor": lambda: first_rows(flat, num_sampled_rows(flat)),
    }
    ranks = {
        "unpack": lambda: decode_share(packed),
        "micro-batches": lambda: lay_out_batches(own, share.row_sets(), pad_id=0, device=cpu),
        "finite, denominator": check_results,
        "metrics": lambda: token_metrics(own, clip=clip, kl_coef=0.1),
    }
    num_few = sum(len(answer.outputs[0].token_ids) for answer in answers)
    stages = {name: Stage(run=run, num_tokens=flat.num_tokens) for name, run in leader.items()}
    stages |= {
        name: Stage(run=run, num_tokens=own.num_tokens, of="a rank") for name, run in ranks.items()
    }
    in_process = Stage(
        run=lambda: convert_answers(answers), num_tokens=num_few, of="a sampler's process"
    )
    return {**stages, "answers of vLLM": in_process}


def measure_stages(num_tokens: int, rounds: int = ROUNDS) -> Mapping[str, Timing]:
    """Return the processor time of each stage, the least of its runs."""
    stages = make_stages(num_tokens)
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in stages}
    gc.collect()
    gc.freeze()
    for round_number in range(rounds + 1):
        for side in (0, 1):
            for name, stage in stages.items():
                start = time.process_time()
                stage.run()
                if round_number:  # the first round allocates
                    seconds[name][side].append(time.process_time() - start)
    return {
        name: Timing(
            ms=min(one + other) * 1e9 / stages[name].num_tokens,
            control=statistics.median(one) / statistics.median(other),
            of=stages[name].of,
        )
        for name, (one, other) in seconds.items()
    }


def main(num_tokens: int = 1_000_000) -> None:
    """Print the processor time of each stage."""
    say = Console(highlight=False, soft_wrap=True).print
    torch.set_num_threads(1)
    timings = measure_stages(num_tokens)
    say("| stage | work of | ms per million of its tokens | A/A |\n| --- | --- | --- | --- |")
    for name, timing in timings.items():
        say(f"| {name} | {timing.of} | {timing.ms:.1f} | {timing.control:.2f} |")
    for of in ("first process", "a rank"):
        total = sum(timing.ms for timing in timings.values() if timing.of == of)
        say(f"| all stages | {of} | {total:.1f} | |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
