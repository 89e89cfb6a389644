"""Memory of a run: kinds of tensors, bytes by phase, and fractions of a device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WEIGHTS, REFERENCE, OPTIMISER = "weights", "reference", "optimiser"
GRADIENTS, COPIES = "gradients", "bf16 copies"
ACTIVATIONS, LOGITS, CACHE = "activations", "logits", "cache"
GATHERED = "gathered layers"
KINDS = (
    *(WEIGHTS, REFERENCE, OPTIMISER, GRADIENTS, COPIES, ACTIVATIONS, LOGITS, CACHE),
    GATHERED,
)

READING, SAMPLING, EVALUATING = "reading", "sampling", "evaluating"
SCORING, UPDATING, COMMITTING = "scoring", "updating", "committing"
PHASES = (READING, SAMPLING, EVALUATING, SCORING, UPDATING, COMMITTING)

# Memory of a GPU that no tensor shows. About 300 MB of context were seen since CUDA 11.7 loads
# kernels lazily (github.com/pytorch/pytorch/issues/107667); the other two are assumptions.
CONTEXT_BYTES = 2**29
NCCL_BYTES = 2**29
FRAGMENTATION = 0.05  # of the peak
FP32_BYTES, BF16_BYTES = 4, 2  # bytes per entry
NUM_MOMENTS = 2  # of AdamW, per trained weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase of a step at its peak memory."""

    name: str
    num_bytes: Mapping[str, int]
    """By kind of tensor."""

    def __post_init__(self) -> None:
        nonzero = {kind: self.num_bytes[kind] for kind in KINDS if self.num_bytes.get(kind, 0) > 0}
        object.__setattr__(self, "num_bytes", nonzero)

    @property
    def total_bytes(self) -> int:
        """Bytes of all kinds together."""
        return sum(self.num_bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The memory of one GPU."""

    phase: Phase
    """The phase with the highest peak."""
    allowance: Mapping[str, int]
    """Bytes reserved for what no tensor shows, by name."""
    free_bytes: int
    """Bytes; negative where the learner does not fit."""
    engine_bytes: int
    """Bytes that an engine on the same GPU can use."""
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
    phases: Sequence[Phase], *, num: int, memory: int, num_parameters: int, engine_sleeps: bool
) -> DeviceMemory:
    """Return the memory that is left on each of `num` devices.

    An engine that sleeps while the learner trains shares the device with its state alone.

    >>> one = Phase(name="updating", num_bytes={"weights": 20 * 2**30, "activations": 10 * 2**30})
    >>> device = memory_per_device(
    ...     [one], num=1, memory=40 * 2**30, num_parameters=10, engine_sleeps=False
    ... )
    >>> device.allowance["fragmentation"] / 2**30, device.free_bytes / 2**30
    (1.5, 8.0)
    >>> device.sampler_fraction
    0.2
    """
    peak = largest_phase(phases)
    allowance = {
        "CUDA context": CONTEXT_BYTES,
        "NCCL buffers": NCCL_BYTES if num > 1 else 0,
        "fragmentation": round(FRAGMENTATION * peak.total_bytes),
    }
    reserved = sum(allowance.values())
    free_bytes = memory - peak.total_bytes - reserved
    state = sum(peak.num_bytes.get(kind, 0) for kind in (WEIGHTS, REFERENCE, OPTIMISER))
    engine_bytes = memory - state - reserved if engine_sleeps else free_bytes
    return DeviceMemory(
        phase=peak,
        allowance={name: size for name, size in allowance.items() if size},
        free_bytes=free_bytes,
        engine_bytes=engine_bytes,
        sampler_fraction=max(0, 100 * engine_bytes // memory) / 100,
        sampler_weight_bytes=BF16_BYTES * num_parameters,
    )
