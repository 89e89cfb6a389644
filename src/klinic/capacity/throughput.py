"""Estimate the duration of a step on many accelerators and their best split, by arithmetic.

    learner   the longer of its matrix products and of gathering its shards
    sampler   prefill is bound by matrix products; each decoded token by the longer of reading all
              weights and the KV cache of all rows from memory, and matrix products

Everything else is ignored: kernel launches, rows of different lengths, rewards, waiting.
"""

from dataclasses import dataclass

from klinic.capacity.bytes_moved import gathered_bytes
from klinic.capacity.flops import DecoderShape, Flop, StepFlops, StepSizes, step_flops
from klinic.capacity.memory import BF16_BYTES, FP32_BYTES, state_bytes

STATE_MEMORY_FRACTION = (
    0.5  # fraction of memory for weights or a learner's state; the rest is for activations
)
ENGINE_MEMORY_FRACTION = 0.9  # fraction of memory that an engine uses, vLLM's default


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One of many identical devices, with the vendor's figures."""

    memory: int | float = 80e9
    flops: float = 1e15
    """Matrix products in bf16, FLOP per second."""
    flops_fp32: float = 6.7e13
    """The same in fp32."""
    utilization: float = 0.4
    """Achieved fraction of both."""
    bandwidth: float = 3.35e12
    """Bytes per second between memory and cores."""
    network: float = 5e10
    """Bytes per second between any two devices: 400 Gb/s."""

    def compute_seconds(self, work: Flop) -> float:
        """Return the compute time on one device."""
        return (work.layers / self.flops + work.head / self.flops_fp32) / self.utilization


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerTime:
    """Seconds of a step spent in the learner."""

    computing: float
    gathering: float
    """Communication of shards; it overlaps with computing."""
    kl: float
    """The part of `computing` that only a KL term needs."""

    @property
    def total_seconds(self) -> float:
        """Total duration."""
        return max(self.computing, self.gathering)


def learner_time(
    shape: DecoderShape, sizes: StepSizes, device: Accelerator, *, num: int
) -> LearnerTime:
    """Return the learner's time per step on `num` accelerators."""
    work = step_flops(shape, sizes)
    return LearnerTime(
        computing=device.compute_seconds(work.learning) / num,
        gathering=gathered_bytes(shape, sizes, num=num) / device.network,
        kl=device.compute_seconds(work.kl) / num,
    )


def min_learner_devices(shape: DecoderShape, device: Accelerator, *, reference: bool) -> int:
    """Return the fewest accelerators whose memory budget holds a learner's state."""
    num_bytes = state_bytes(
        num_parameters=shape.num_parameters,
        num_trained=shape.num_trained,
        num_reference=shape.num_parameters if reference and shape.trains_all else 0,
    )
    return max(1, -(-sum(num_bytes.values()) // int(STATE_MEMORY_FRACTION * device.memory)))


def min_engine_devices(shape: DecoderShape, device: Accelerator) -> int:
    """Return the fewest accelerators, a power of two, that hold a sampler's bf16 weights."""
    num = 1
    while (
        BF16_BYTES * shape.num_parameters
        > STATE_MEMORY_FRACTION * ENGINE_MEMORY_FRACTION * device.memory * num
    ):
        num *= 2
    return num


def max_parallel_rows(
    shape: DecoderShape, sizes: StepSizes, device: Accelerator, *, num: int
) -> int:
    """Return how many completions' KV caches fit next to the weights on an engine of `num`."""
    free = ENGINE_MEMORY_FRACTION * device.memory * num - BF16_BYTES * shape.num_parameters
    return int(free // kv_cache_bytes(shape, sizes))


def kv_cache_bytes(shape: DecoderShape, sizes: StepSizes) -> int:
    """Return the bytes of one completion's KV cache at its end, in bf16."""
    return BF16_BYTES * shape.kv_entries_per_token * (sizes.prompt_length + sizes.completion_length)


def checkpointed_bytes(shape: DecoderShape, sizes: StepSizes) -> int:
    """Return the bytes autograd stores per row with checkpointing: the input of every layer."""
    length = sizes.prompt_length + sizes.completion_length
    return FP32_BYTES * shape.hidden * shape.num_layers * length


def sampling_seconds(
    shape: DecoderShape, sizes: StepSizes, device: Accelerator, *, num: int
) -> float:
    """Return the seconds that `num` accelerators need to sample a step."""
    size = min_engine_devices(shape, device)
    engines = num // size
    if not engines:
        return float("inf")
    rows = -(-sizes.rows // engines)
    fits = max_parallel_rows(shape, sizes, device, num=size)
    if not fits:
        return float("inf")
    waves = -(-rows // fits)
    work = step_flops(shape, sizes)
    reading = work.reading.total_flops / (device.flops * device.utilization * num)
    return reading + waves * _decoding_seconds(
        shape, sizes, device, work=work, rows=rows / waves, num=size
    )


def _decoding_seconds(
    shape: DecoderShape,
    sizes: StepSizes,
    device: Accelerator,
    *,
    work: StepFlops,
    rows: int | float,
    num: int,
) -> float:
    """Return the seconds that `num` accelerators need to decode `rows` completions in parallel."""
    mean_length = sizes.prompt_length + sizes.completion_length / 2
    num_bytes = BF16_BYTES * (
        shape.num_parameters + rows * shape.kv_entries_per_token * mean_length
    )
    flop = work.sampling.total_flops * rows / sizes.num_completion_tokens
    token = max(num_bytes / device.bandwidth, flop / (device.flops * device.utilization))
    return sizes.completion_length * token / num


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSplit:
    """Accelerators divided between samplers and a learner that run concurrently."""

    samplers: int
    learners: int
    sampling: float
    """Seconds per step."""
    learning: LearnerTime


def best_split(
    shape: DecoderShape, sizes: StepSizes, device: Accelerator, *, num: int
) -> DeviceSplit | None:
    """Return the split of `num` accelerators with the shortest step.

    None where there are too few for both.
    """
    size = min_engine_devices(shape, device)
    num_learners = min_learner_devices(shape, device, reference=sizes.reference)
    candidates = [
        DeviceSplit(
            samplers=samplers,
            learners=num - samplers,
            sampling=sampling_seconds(shape, sizes, device, num=samplers),
            learning=learner_time(shape, sizes, device, num=num - samplers),
        )
        for samplers in range(size, num - num_learners + 1, size)
    ]
    return min(candidates, key=lambda s: max(s.sampling, s.learning.total_seconds), default=None)


def sync_seconds(num_bytes: int | float, device: Accelerator) -> float:
    """Return the time to sync weights that pass through one process, in and out."""
    return 2 * num_bytes / device.network


def ideal_sync_seconds(shape: DecoderShape, device: Accelerator, *, num: int) -> float:
    """Return the time to sync bf16 weights from each of `num` shards directly to the samplers."""
    return BF16_BYTES * shape.num_trained / num / device.network


def startup_bytes(shape: DecoderShape, *, reference: bool, processes: int) -> int:
    """Return the host memory that the first machine's processes need at start-up.

    Each loads the full policy and, with a KL and no adapter, copies it as the reference before
    sharding.
    """
    copies = 2 if reference and shape.trains_all else 1
    return FP32_BYTES * shape.num_parameters * copies * processes
