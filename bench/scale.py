"""`python -m bench.scale`: write the tables of docs/explanation/scale.md.

Every figure comes from `klinic.model`; a test holds the page to it.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.arithmetic_runs import markdown
from bench.goodput import best_checkpoint_interval, goodput_fraction
from klinic.capacity import bytes_moved, throughput
from klinic.capacity.flops import DecoderShape, StepSizes, dense_shape, step_flops
from klinic.capacity.memory import (
    BF16_BYTES,
    FP32_BYTES,
    GRADIENTS,
    OPTIMISER,
    REFERENCE,
    WEIGHTS,
    state_bytes,
)
from klinic.learner.diagnostics import LATE_INTERVAL

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "scale.md"
TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)

MODELS: Mapping[str, DecoderShape] = {
    "1B": dense_shape(
        num_layers=16, hidden=2048, inner=8192, heads=(32, 8, 64), vocabulary=128256, tied=True
    ),
    "8B": dense_shape(
        num_layers=32, hidden=4096, inner=14336, heads=(32, 8, 128), vocabulary=128256
    ),
    "32B": dense_shape(
        num_layers=64, hidden=5120, inner=27648, heads=(40, 8, 128), vocabulary=152064
    ),
    "70B": dense_shape(
        num_layers=80, hidden=8192, inner=28672, heads=(64, 8, 128), vocabulary=128256
    ),
    "405B": dense_shape(
        num_layers=126, hidden=16384, inner=53248, heads=(128, 8, 128), vocabulary=128256
    ),
}
STEP = StepSizes(
    prompts=128,
    group=8,
    prompt_length=1024,
    completion_length=8192,
    micro_batch=1,
    reference=True,
    split_gradient_fraction=1 / LATE_INTERVAL,
)
DEVICE = throughput.Accelerator()
GIVEN = {"1B": 8, "8B": 16, "32B": 64, "70B": 256, "405B": 1024}
"""Accelerators that each model is given."""
MACHINE = 8  # accelerators, and processes of a learner, in one machine
BETWEEN_FAILURES = 3 * 3600.0  # seconds
CHECKPOINTS = (1.0, 10.0, 60.0)  # seconds that writing one takes
RECOVERY = {
    # seconds until two more steps were made (tests/cluster, in docs/log.md), and whether from a
    # checkpoint
    "a host of samplers loses its power": (3.4, False),
    "a host of samplers loses its cable": (8.7, False),
    "a sampler hangs": (30.8, False),
    "Ray's own process is killed": (26.2, True),
    "the first process is killed": (28.1, True),
    "a learner is killed": (36.6, True),
    "a learner hangs": (53.9, True),
}
LEADER, RANK = 58e-9, 121e-9  # seconds a token of the step, and of a rank's rows, on one core:
# bench.leader_cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A run of some size."""

    num: int
    model: str
    prompts: int


PLACES = (
    Place(num=10, model="8B", prompts=64),
    Place(num=1_000, model="70B", prompts=1_024),
    Place(num=10_000, model="405B", prompts=8_192),
)


def amount(num_bytes: float) -> str:
    """Return bytes in decimal units, with three figures.

    >>> amount(1.6234e12), amount(42e3)
    ('1.62 TB', '42 KB')
    """
    units = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "KB": 1e3}
    unit, one = next((u, n) for u, n in units.items() if num_bytes >= n or u == "KB")
    return f"{three(num_bytes / one)} {unit}"


def three(num: float) -> str:
    """Return a number with three figures.

    >>> three(0.012345), three(12.34), three(12345.6)
    ('0.0123', '12.3', '12,346')
    """
    return f"{num:,.0f}" if num >= 100 else f"{num:.3g}"


def table(columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """Return a table in Markdown."""
    made = markdown(["", *columns], [[name, *cells] for name, cells in rows.items()])
    return made.replace("|  |", "| |") + "\n"


def _each(figure: Callable[[str, DecoderShape], str]) -> list[str]:
    return [figure(name, shape) for name, shape in MODELS.items()]


def held() -> str:
    """Return what a model takes, wherever it is."""

    def state(kind: str) -> Callable[[str, DecoderShape], str]:
        def figure(_: str, shape: DecoderShape) -> str:
            num = shape.num_parameters
            found = state_bytes(num_parameters=num, num_trained=num, num_reference=num)
            return amount(found[kind])

        return figure

    longest = STEP.prompt_length + STEP.completion_length
    rows = {
        "parameters": lambda _, s: f"{s.num_parameters / 1e9:.2f}e9",
        "weights, fp32": state(WEIGHTS),
        "gradients, fp32": state(GRADIENTS),
        "moments of AdamW, fp32": state(OPTIMISER),
        "reference, a copy in fp32": state(REFERENCE),
        "reference, an adapter off": lambda *_: "0",
        "a sampler's weights, bf16": lambda _, s: amount(BF16_BYTES * s.num_parameters),
        "cache, a token, bf16": lambda _, s: amount(BF16_BYTES * s.kv_entries_per_token),
        f"cache, a row of {longest:,} tokens": lambda _, s: amount(
            throughput.kv_cache_bytes(s, STEP)
        ),
        "inputs of layers, a row, fp32": lambda _, s: amount(
            throughput.checkpointed_bytes(s, STEP)
        ),
        "logits of a row, never held": lambda _, s: amount(
            FP32_BYTES * s.vocabulary * STEP.completion_length
        ),
        "logits of the step, never held": lambda _, s: amount(
            FP32_BYTES * s.vocabulary * STEP.num_completion_tokens
        ),
    }
    return table(list(MODELS), {name: _each(figure) for name, figure in rows.items()})


def moved() -> str:
    """Return what a step moves."""

    def adapters(shape: DecoderShape) -> DecoderShape:
        return replace(shape, num_trained=0)

    rows = {
        "weights to a sampler, bf16": lambda _, s: amount(bytes_moved.sync_bytes(s, BF16_BYTES)),
        "seconds through the first process": lambda _, s: three(
            throughput.sync_seconds(bytes_moved.sync_bytes(s, BF16_BYTES), DEVICE)
        ),
        "seconds from shard to shard, bf16": lambda n, s: three(
            throughput.ideal_sync_seconds(s, DEVICE, num=_learners(n))
        ),
        "gathered for a forward pass": lambda _, s: amount(bytes_moved.pass_bytes(s)),
        "seconds of it": lambda _, s: three(bytes_moved.pass_bytes(s) / DEVICE.network),
        "evidence of a step": lambda _, s: amount(bytes_moved.stored_bytes(s, STEP)),
        "rows to all learner processes": lambda *_: amount(bytes_moved.sent_bytes(STEP)),
        "host memory of policy and reference, loaded by shard": lambda _, s: amount(
            2 * FP32_BYTES * s.num_parameters
        ),
        f"host memory to start {MACHINE} processes, loaded whole": lambda _, s: amount(
            throughput.startup_bytes(s, reference=True, processes=MACHINE)
        ),
        "the same with adapters": lambda _, s: amount(
            throughput.startup_bytes(adapters(s), reference=True, processes=MACHINE)
        ),
    }
    return table(list(MODELS), {name: _each(figure) for name, figure in rows.items()})


def _split(name: str) -> throughput.DeviceSplit:
    found = throughput.best_split(MODELS[name], STEP, DEVICE, num=GIVEN[name])
    assert found is not None  # noqa: S101 - they are given enough
    return found


def _learners(name: str) -> int:
    return _split(name).learners


def taken() -> str:
    """Return how long a step takes, and how accelerators are divided."""

    def kl(name: str, _: DecoderShape) -> str:
        return f"{_split(name).learning.kl / _split(name).learning.computing:.0%}"

    def head(_: str, shape: DecoderShape) -> str:
        done = step_flops(shape, STEP).learning
        slow = done.head / DEVICE.flops_fp32
        return f"{slow / (slow + done.layers / DEVICE.flops):.0%}"

    rows = {
        "accelerators": lambda n, _: f"{GIVEN[n]:,}",
        "of an engine, at least": lambda _, s: str(throughput.min_engine_devices(s, DEVICE)),
        "rows that its cache holds": lambda _, s: str(
            throughput.max_parallel_rows(
                s, STEP, DEVICE, num=throughput.min_engine_devices(s, DEVICE)
            )
        ),
        "best division, samplers : learners": lambda n, _: (
            f"{_split(n).samplers} : {_split(n).learners}"
        ),
        "seconds of sampling": lambda n, _: three(_split(n).sampling),
        "seconds of computing": lambda n, _: three(_split(n).learning.computing),
        "seconds of gathering shards": lambda n, _: three(_split(n).learning.gathering),
        "the KL's share of computing": kl,
        "the head's share of computing": head,
    }
    return table(list(MODELS), {name: _each(figure) for name, figure in rows.items()})


def placed() -> str:
    """Return what the first process has to do in runs of three sizes."""
    columns = [f"{place.num:,}: {place.model}" for place in PLACES]
    steps = [replace(STEP, prompts=place.prompts) for place in PLACES]
    shapes = [MODELS[place.model] for place in PLACES]
    splits = [
        throughput.best_split(shape, sizes, DEVICE, num=place.num)
        for place, shape, sizes in zip(PLACES, shapes, steps, strict=True)
    ]
    learners = [found.learners if found else 0 for found in splits]

    def sending(number: int) -> float:
        return bytes_moved.sent_bytes(steps[number]) / DEVICE.network

    def leading(number: int) -> float:
        return LEADER * steps[number].num_completion_tokens

    def slower(number: int) -> float:
        found = splits[number]
        return math.nan if found is None else max(found.sampling, found.learning.total_seconds)

    def of_rows(number: int) -> float:
        return RANK * steps[number].num_completion_tokens / learners[number]

    rows: dict[str, Callable[[int], str]] = {
        "completions of a step": lambda i: f"{steps[i].rows:,}",
        "tokens of them": lambda i: f"{steps[i].num_completion_tokens / 1e6:,.1f} million",
        "samplers : learners": lambda i: f"{PLACES[i].num - learners[i]:,} : {learners[i]:,}",
        "rows for each learner": lambda i: three(steps[i].rows / learners[i]),
        "seconds of a step, both sides at once": lambda i: three(slower(i)),
        "rows to each process": lambda i: amount(bytes_moved.sent_bytes(steps[i]) / learners[i]),
        "seconds of the first process": lambda i: three(leading(i)),
        "seconds to send the rows": lambda i: three(sending(i)),
        "both, as a fraction of the step": lambda i: f"{(leading(i) + sending(i)) / slower(i):.1%}",
        "seconds of each process for its rows": lambda i: three(of_rows(i)),
        "results of the doctor's sample": lambda i: amount(bytes_moved.sample_bytes(steps[i])),
        "evidence of a step": lambda i: amount(bytes_moved.stored_bytes(shapes[i], steps[i])),
        "files of a step": lambda i: f"{min(learners[i], steps[i].rows):,}",
        "weights through the first process": lambda i: amount(
            bytes_moved.sync_bytes(shapes[i], BF16_BYTES)
        ),
        "seconds of that": lambda i: three(
            throughput.sync_seconds(bytes_moved.sync_bytes(shapes[i], BF16_BYTES), DEVICE)
        ),
    }
    numbers = range(len(PLACES))
    return table(columns, {name: [figure(i) for i in numbers] for name, figure in rows.items()})


def survived() -> str:
    """Return what failures every three hours leave of a run, by what a checkpoint takes."""
    rows = {}
    for what, (recovery, resumes) in RECOVERY.items():
        rows[what] = [f"{recovery:.0f} s"]
        for seconds in CHECKPOINTS:
            best = best_checkpoint_interval(checkpoint=seconds, between_failures=BETWEEN_FAILURES)
            left = goodput_fraction(
                checkpoint=seconds,
                interval=best,
                recovery=recovery,
                between_failures=BETWEEN_FAILURES,
                resumes=resumes,
            )
            rows[what].append(f"{left:.1%}")
    every = [
        f"{best_checkpoint_interval(checkpoint=c, between_failures=BETWEEN_FAILURES):.0f} s"
        for c in CHECKPOINTS
    ]
    rows["best time between checkpoints"] = ["", *every]
    return table(["goes on after", *(f"checkpoints of {c:g} s" for c in CHECKPOINTS)], rows)


TABLES = {"held": held, "moved": moved, "taken": taken, "placed": placed, "survived": survived}


def written(page: str) -> str:
    """Return a page with its tables made anew."""
    return TABLE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
