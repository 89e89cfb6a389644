"""How long a step takes on many accelerators, and how they are best divided, by arithmetic.

    learner   the longer of its matrix products and of gathering its shards
    sampler   reading prompts is bound by matrix products; each further token by the longer of
              reading all weights and the cache of all rows from memory, and matrix products

Everything else is left out: starting kernels, rows of different lengths, rewards, waiting.
"""

from dataclasses import dataclass

from klinic.model.memory import BF16, FP32, state_bytes
from klinic.model.shape import Shape
from klinic.model.traffic import gathered_bytes
from klinic.model.work import Flop, StepSizes, Work, work_of

ROOM = 0.5  # share of a memory that weights or a learner's state may take; the rest is at work
SAMPLERS = 0.9  # share of a memory that an engine takes, vLLM's default


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One of many equal devices, as its maker describes it."""

    memory: int | float = 80e9
    flops: float = 1e15
    """Matrix products in bf16, FLOP a second."""
    flops_fp32: float = 6.7e13
    """The same in fp32."""
    use: float = 0.4
    """Share of both that is reached."""
    bandwidth: float = 3.35e12
    """Bytes a second between its memory and its cores."""
    network: float = 5e10
    """Bytes a second between any two devices: 400 Gb/s."""

    def seconds(self, work: Flop) -> float:
        """Return how long one of them computes."""
        return (work.layers / self.flops + work.head / self.flops_fp32) / self.use


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """Seconds of a step in which a learner is at work."""

    computing: float
    gathering: float
    """Passing shards round; it goes on beside computing."""
    kl: float
    """Of the computing, what only a KL asks for."""

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return max(self.computing, self.gathering)


def learning(shape: Shape, sizes: StepSizes, device: Accelerator, *, num: int) -> Learning:
    """Return how long `num` accelerators learn from a step."""
    work = work_of(shape, sizes)
    return Learning(
        computing=device.seconds(work.learning) / num,
        gathering=gathered_bytes(shape, sizes, num=num) / device.network,
        kl=device.seconds(work.kl) / num,
    )


def smallest_learner(shape: Shape, device: Accelerator, *, reference: bool) -> int:
    """Return how many accelerators hold a learner's state in a part of their memory."""
    held = state_bytes(
        num_parameters=shape.num_parameters,
        num_trained=shape.num_trained,
        num_reference=shape.num_parameters if reference and shape.trains_all else 0,
    )
    return max(1, -(-sum(held.values()) // int(ROOM * device.memory)))


def smallest_engine(shape: Shape, device: Accelerator) -> int:
    """Return how many accelerators, a power of two, hold the weights of a sampler in bf16."""
    num = 1
    while BF16 * shape.num_parameters > ROOM * SAMPLERS * device.memory * num:
        num *= 2
    return num


def rows_at_once(shape: Shape, sizes: StepSizes, device: Accelerator, *, num: int) -> int:
    """Return the completions whose cache fits beside the weights of an engine of `num`."""
    free = SAMPLERS * device.memory * num - BF16 * shape.num_parameters
    return int(free // cache_bytes(shape, sizes))


def cache_bytes(shape: Shape, sizes: StepSizes) -> int:
    """Return the bytes of keys and values of one completion at its end, in bf16."""
    return BF16 * shape.num_cached * (sizes.prompt_length + sizes.completion_length)


def kept_bytes(shape: Shape, sizes: StepSizes) -> int:
    """Return what autograd keeps of one row with checkpointing: the input of every layer."""
    length = sizes.prompt_length + sizes.completion_length
    return FP32 * shape.hidden * shape.num_layers * length


def sampling(shape: Shape, sizes: StepSizes, device: Accelerator, *, num: int) -> float:
    """Return how many seconds `num` accelerators sample for a step."""
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
    """Return the seconds in which `num` accelerators draw all tokens of so many rows at once."""
    halfway = sizes.prompt_length + sizes.completion_length / 2
    moved = BF16 * (shape.num_parameters + rows * shape.num_cached * halfway)
    flop = work.sampling.total * rows / sizes.num_completion_tokens
    token = max(moved / device.bandwidth, flop / (device.flops * device.use))
    return sizes.completion_length * token / num


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Accelerators for samplers and for a learner, side by side."""

    samplers: int
    learners: int
    sampling: float
    """Seconds of a step."""
    learning: Learning


def split(shape: Shape, sizes: StepSizes, device: Accelerator, *, num: int) -> Split | None:
    """Return the division of `num` accelerators at which neither side waits long for the other.

    None where they are too few for both.
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
    """Return how long weights need that are gathered in one process and sent on from there."""
    return 2 * num_bytes / device.network


def ideal_sync_seconds(shape: Shape, device: Accelerator, *, num: int) -> float:
    """Return how long they need from each of `num` shards to where they are used, in bf16."""
    return BF16 * shape.num_trained / num / device.network


def start_bytes(shape: Shape, *, reference: bool, processes: int) -> int:
    """Return the host memory that the first machine's processes need while they start.

    Each loads the whole policy and, with a KL and no adapter, copies it for a reference before any
    of it is sharded; the first keeps one more, to sample from.
    """
    copies = 2 if reference and shape.trains_all else 1
    return FP32 * shape.num_parameters * (copies * processes + 1)
