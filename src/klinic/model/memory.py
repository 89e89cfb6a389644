"""What a run's memory is made of: kinds of tensors, bytes by phase, and shares of devices."""

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
OF_LEARNER = (SCORING, UPDATING, COMMITTING)

IN_FLIGHT = 2  # layers that a sharded model holds whole: the one at work, and the next
FP32, BF16 = 4, 2  # bytes of a number
MOMENTS = 2  # of AdamW, for each trained weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of a step, at the moment when it holds most."""

    name: str
    num_bytes: Mapping[str, int]
    """By kind of tensor."""

    def __post_init__(self) -> None:
        there = {
            kind: self.num_bytes[kind] for kind in ALL_KINDS if self.num_bytes.get(kind, 0) > 0
        }
        object.__setattr__(self, "num_bytes", there)

    @property
    def total(self) -> int:
        """Bytes of all kinds together."""
        return sum(self.num_bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What one of several GPUs would hold for the learner, by arithmetic."""

    phase: Phase
    """The one that holds most."""
    left: int
    """Bytes; negative where the learner does not fit."""
    sampler_share: float
    """Of the device, that a sampler beside the learner could be given at most."""
    sampler_weights: int
    """Bytes of them that its own copy of the model in bf16 takes."""


def state_bytes(*, num_parameters: int, num_trained: int, num_reference: int) -> dict[str, int]:
    """Return what a learner holds from step to step, and its gradient: all of it in fp32.

    >>> state_bytes(num_parameters=10, num_trained=3, num_reference=0)
    {'weights': 40, 'reference': 0, 'optimiser': 24, 'gradients': 12}
    """
    return {
        WEIGHTS: FP32 * num_parameters,
        REFERENCE: FP32 * num_reference,
        OPTIMISER: MOMENTS * FP32 * num_trained,
        GRADIENTS: FP32 * num_trained,
    }


def largest(phases: Sequence[Phase]) -> Phase:
    """Return the phase that holds most."""
    return max(phases, key=lambda phase: phase.total)


def highest_by_name(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """Return of each name the one that holds most, in the order of a step."""
    named = [[phase for phase in phases if phase.name == name] for name in PHASES]
    return tuple(largest(found) for found in named if found)


def extended(second: Mapping[str, int], third: Mapping[str, int], num: int) -> dict[str, int]:
    """Return the bytes after `num` equal steps, of which the second and third were measured.

    >>> extended({"cache": 10, "logits": 7}, {"cache": 12, "logits": 7}, 5)
    {'logits': 7, 'cache': 16}
    """
    kinds = [kind for kind in KINDS if kind in second or kind in third]
    return {
        kind: second.get(kind, 0) + (num - 2) * (third.get(kind, 0) - second.get(kind, 0))
        for kind in kinds
    }


def per_device(
    phases: Sequence[Phase], *, num: int, memory: int, largest_layer: int, num_parameters: int
) -> Device:
    """Return what each of `num` devices would hold if the learner were sharded over them.

    As with FSDP's full shard: weights, reference, gradients and optimiser are cut into equal parts,
    each device has a micro-batch of its own, and layers are gathered one after the other.

    >>> one = Phase(name="updating", num_bytes={"weights": 80, "activations": 30})
    >>> device = per_device([one], num=4, memory=100, largest_layer=5, num_parameters=10)
    >>> device.phase.num_bytes, device.left
    ({'weights': 20, 'activations': 30, 'gathered layers': 10}, 40)
    >>> device.sampler_share
    0.4
    """
    gathered = {GATHERED: IN_FLIGHT * largest_layer} if num > 1 else {}
    sharded = [
        Phase(
            name=phase.name,
            num_bytes={
                kind: -(-held // num) if kind in SHARDED else held
                for kind, held in phase.num_bytes.items()
            }
            | gathered,
        )
        for phase in phases
        if phase.name in OF_LEARNER
    ]
    highest = largest(sharded)
    left = memory - highest.total
    return Device(
        phase=highest,
        left=left,
        sampler_share=max(0, 100 * left // memory) / 100,
        sampler_weights=BF16 * num_parameters,
    )
