"""Estimate the duration of a step on many accelerators and their best split, by arithmetic.

    learner   the longer of its matrix products and of gathering its shards
    sampler   prefill is bound by matrix products; each decoded token by the longer of reading all
              weights and the KV cache of all rows from memory, and matrix products

Everything else is ignored: kernel launches, rows of different lengths, rewards, waiting.
"""

from dataclasses import dataclass

from klinic.model.memory import BF16, FP32, state_bytes
from klinic.model.shape import Shape
from klinic.model.traffic import gathered_bytes
from klinic.model.work import Flop, StepSizes, Work, work_of

ROOM = 0.5  # fraction of memory for weights or a learner's state; the rest is for activations
SAMPLERS = 0.9  # fraction of memory that an engine uses, vLLM's default


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One of many identical devices, with the vendor's figures."""

    memory: int | float = 80e9
    flops: float = 1e15
    """Matrix products in bf16, FLOP per second."""
    flops_fp32: float = 6.7e13
    """The same in fp32."""
    use: float = 0.4
    """Achieved fraction of both."""
    bandwidth: float = 3.35e12
    """Bytes per second between memory and cores."""
    network: float = 5e10
    """Bytes per second between any two devices: 400 Gb/s."""

    def seconds(self, work: Flop) -> float:
        """Return the compute time on one device."""
        return (work.layers / self.flops + work.head / self.flops_fp32) / self.use


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """Seconds of a step spent in the learner."""

    computing: float
    gathering: float
    """Communication of shards; it overlaps with computing."""
    kl: float
    """The part of `computing` that only a KL term needs."""

    @property
    def seconds(self) -> float:
        """Total duration."""
        return max(self.computing, self.gathering)


def learning(shape: Shape, sizes: StepSizes, device: Accelerator, *, num: int) -> Learning:
    """Return the learner's time per step on `num` accelerators."""
    work = work_of(shape, sizes)
    return Learning(
        computing=device.seconds(work.learning) / num,
        gathering=gathered_bytes(shape, sizes, num=num) / device.network,
        kl=device.seconds(work.kl) / num,
    )


def smallest_learner(shape: Shape, device: Accelerator, *, reference: bool) -> int:
    """Return the fewest accelerators whose memory budget holds a learner's state."""
    held = state_bytes(
        num_parameters=shape.num_parameters,
        num_trained=shape.num_trained,
        num_reference=shape.num_parameters if reference and shape.trains_all else 0,
    )
    return max(1, -(-sum(held.values()) // int(ROOM * device.memory)))


def smallest_engine(shape: Shape, device: Accelerator) -> int:
    """Return the fewest accelerators, a power of two, that hold a sampler's bf16 weights."""
    num = 1
    while BF16 * shape.num_parameters > ROOM * SAMPLERS * device.memory * num:
        num *= 2
    return num


def rows_at_once(shape: Shape, sizes: StepSizes, device: Accelerator, *, num: int) -> int:
    """Return how many completions' KV caches fit next to the weights on an engine of `num`."""
    free = SAMPLERS * device.memory * num - BF16 * shape.num_parameters
    return int(free // cache_bytes(shape, sizes))


def cache_bytes(shape: Shape, sizes: StepSizes) -> int:
    """Return the bytes of one completion's KV cache at its end, in bf16."""
    return BF16 * shape.num_cached * (sizes.prompt_length + sizes.completion_length)


def kept_bytes(shape: Shape, sizes: StepSizes) -> int:
    """Return the bytes autograd stores per row with checkpointing: the input of every layer."""
    length = sizes.prompt_length + sizes.completion_length
    return FP32 * shape.hidden * shape.num_layers * length


def sampling(shape: Shape, sizes: StepSizes, device: Accelerator, *, num: int) -> float:
    """Return the seconds that `num` accelerators need to sample a step."""
    size = smallest_engine(shape, device)
    engines = num // size
    if not engines:
        return float("inf")
    rows = -(-sizes.rows // engines)
    fits = rows_at_once(shape, sizes, device, num=size)
    if not fits:
        return float("inf")
    waves = -(-rows // fits)
    work = work_of(shape, sizes)
    reading = work.reading.total / (device.flops * device.use * num)
    return reading + waves * _drawing(shape, sizes, device, work=work, rows=rows / waves, num=size)


def _drawing(
    shape: Shape, sizes: StepSizes, device: Accelerator, *, work: Work, rows: int | float, num: int
) -> float:
    """Return the seconds that `num` accelerators need to decode `rows` completions in parallel."""
    halfway = sizes.prompt_length + sizes.completion_length / 2
    moved = BF16 * (shape.num_parameters + rows * shape.num_cached * halfway)
    flop = work.sampling.total * rows / sizes.num_completion_tokens
    token = max(moved / device.bandwidth, flop / (device.flops * device.use))
    return sizes.completion_length * token / num


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Accelerators divided between samplers and a learner that run concurrently."""

    samplers: int
    learners: int
    sampling: float
    """Seconds per step."""
    learning: Learning


def split(shape: Shape, sizes: StepSizes, device: Accelerator, *, num: int) -> Split | None:
    """Return the split of `num` accelerators with the shortest step.

    None where there are too few for both.
    """
    size = smallest_engine(shape, device)
    least = smallest_learner(shape, device, reference=sizes.reference)
    found = [
        Split(
            samplers=samplers,
            learners=num - samplers,
            sampling=sampling(shape, sizes, device, num=samplers),
            learning=learning(shape, sizes, device, num=num - samplers),
        )
        for samplers in range(size, num - least + 1, size)
    ]
    return min(found, key=lambda s: max(s.sampling, s.learning.seconds), default=None)


def sync_seconds(num_bytes: int | float, device: Accelerator) -> float:
    """Return the time to sync weights that one process gathers and forwards."""
    return 2 * num_bytes / device.network


def ideal_sync_seconds(shape: Shape, device: Accelerator, *, num: int) -> float:
    """Return the time to sync bf16 weights from each of `num` shards directly to the samplers."""
    return BF16 * shape.num_trained / num / device.network


def start_bytes(shape: Shape, *, reference: bool, processes: int) -> int:
    """Return the host memory that the first machine's processes need at start-up.

    Each loads the full policy and, with a KL and no adapter, copies it as the reference before
    sharding; the first keeps one more copy for sampling.
    """
    copies = 2 if reference and shape.trains_all else 1
    return FP32 * shape.num_parameters * (copies * processes + 1)
