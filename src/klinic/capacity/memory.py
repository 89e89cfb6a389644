"""Memory of a run: kinds of tensors, bytes by phase, and fractions of a device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WEIGHTS, REFERENCE, OPTIMISER = "weights", "reference", "optimiser"
GRADIENTS, COPIES = "gradients", "bf16 copies"
ACTIVATIONS, LOGITS, CACHE = "activations", "logits", "cache"
GATHERED = "gathered layers"
KINDS = (WEIGHTS, REFERENCE, OPTIMISER, GRADIENTS, COPIES, ACTIVATIONS, LOGITS, CACHE)
ALL_KINDS = (*KINDS, GATHERED)
SHARDED = (WEIGHTS, REFERENCE, OPTIMISER, GRADIENTS, COPIES)

READING, SAMPLING, EVALUATING = "reading", "sampling", "evaluating"
SCORING, UPDATING, COMMITTING = "scoring", "updating", "committing"
PHASES = (READING, SAMPLING, EVALUATING, SCORING, UPDATING, COMMITTING)
LEARNER_PHASES = (SCORING, UPDATING, COMMITTING)

NUM_GATHERED_LAYERS = 2  # gathered layers of a sharded model: the current and the prefetched one
FP32_BYTES, BF16_BYTES = 4, 2  # bytes per entry
NUM_MOMENTS = 2  # of AdamW, per trained weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase of a step at its peak memory."""

    name: str
    num_bytes: Mapping[str, int]
    """By kind of tensor."""

    def __post_init__(self) -> None:
        nonzero = {
            kind: self.num_bytes[kind] for kind in ALL_KINDS if self.num_bytes.get(kind, 0) > 0
        }
        object.__setattr__(self, "num_bytes", nonzero)

    @property
    def total_bytes(self) -> int:
        """Bytes of all kinds together."""
        return sum(self.num_bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The learner's memory on one of several GPUs, by arithmetic."""

    phase: Phase
    """The phase with the highest peak."""
    free_bytes: int
    """Bytes; negative where the learner does not fit."""
    sampler_fraction: float
    """Largest fraction of the device that a sampler on the same GPU can use."""
    sampler_weight_bytes: int
    """Bytes of the sampler's own bf16 copy of the model."""


def state_bytes(*, num_parameters: int, num_trained: int, num_reference: int) -> dict[str, int]:
    """Return the bytes of a learner's persistent state and its gradient, all in fp32.

    >>> state_bytes(num_parameters=10, num_trained=3, num_reference=0)
    {'weights': 40, 'reference': 0, 'optimiser': 24, 'gradients': 12}
    """
    return {
        WEIGHTS: FP32_BYTES * num_parameters,
        REFERENCE: FP32_BYTES * num_reference,
        OPTIMISER: NUM_MOMENTS * FP32_BYTES * num_trained,
        GRADIENTS: FP32_BYTES * num_trained,
    }


def largest_phase(phases: Sequence[Phase]) -> Phase:
    """Return the phase with the highest peak."""
    return max(phases, key=lambda phase: phase.total_bytes)


def peak_by_phase(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """Return the highest peak of each phase, in the order of a step."""
    by_name = [[phase for phase in phases if phase.name == name] for name in PHASES]
    return tuple(largest_phase(same_name) for same_name in by_name if same_name)


def extrapolate_bytes(
    second: Mapping[str, int], third: Mapping[str, int], num: int
) -> dict[str, int]:
    """Extrapolate the bytes to `num` equal steps from the measured second and third.

    >>> extrapolate_bytes({"cache": 10, "logits": 7}, {"cache": 12, "logits": 7}, 5)
    {'logits': 7, 'cache': 16}
    """
    kinds = [kind for kind in KINDS if kind in second or kind in third]
    return {
        kind: second.get(kind, 0) + (num - 2) * (third.get(kind, 0) - second.get(kind, 0))
        for kind in kinds
    }


def memory_per_device(
    phases: Sequence[Phase], *, num: int, memory: int, largest_layer: int, num_parameters: int
) -> DeviceMemory:
    """Return the memory of each of `num` devices with the learner sharded over them.

    As with FSDP's full shard: weights, reference, gradients and optimizer state are split equally,
    each device has its own micro-batch, and layers are gathered one at a time.

    >>> one = Phase(name="updating", num_bytes={"weights": 80, "activations": 30})
    >>> device = memory_per_device([one], num=4, memory=100, largest_layer=5, num_parameters=10)
    >>> device.phase.num_bytes, device.free_bytes
    ({'weights': 20, 'activations': 30, 'gathered layers': 10}, 40)
    >>> device.sampler_fraction
    0.4
    """
    gathered = {GATHERED: NUM_GATHERED_LAYERS * largest_layer} if num > 1 else {}
    sharded = [
        Phase(
            name=phase.name,
            num_bytes={
                kind: -(-num_bytes // num) if kind in SHARDED else num_bytes
                for kind, num_bytes in phase.num_bytes.items()
            }
            | gathered,
        )
        for phase in phases
        if phase.name in LEARNER_PHASES
    ]
    peak = largest_phase(sharded)
    free_bytes = memory - peak.total_bytes
    return DeviceMemory(
        phase=peak,
        free_bytes=free_bytes,
        sampler_fraction=max(0, 100 * free_bytes // memory) / 100,
        sampler_weight_bytes=BF16_BYTES * num_parameters,
    )
