"""The steps that fix a cause, in the settings of the trainer that wrote the run.

trl      settings of TRL's GRPOConfig and GRPOTrainer
verl     keys of verl's configuration
nemo_rl  keys of NeMo-RL's configuration
own_teacher  a teacher that a user added
"""

from collections.abc import Mapping

from klinic.doctor.advice import nemo_rl, trl, verl

STEPS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "trl": trl.STEPS,
    "verl": verl.STEPS,
    "nemo-rl": nemo_rl.STEPS,
}
"""By trainer and cause, the most likely step first."""

OF_ENGINES = ("With `use_vllm`", "With an own vLLM engine")
"""How steps begin that apply only to samplers outside the trainer."""


def find_steps(cause: str, trainer: str | None, *, has_engine: bool = False) -> tuple[str, ...]:
    """Return the steps that fix a cause in a trainer's settings; empty if there are none.

    With `has_engine`, a sampler outside the trainer, the steps for engines come first.

    >>> find_steps("wrong-reference", "trl")[0]
    'Pass the start model itself as `model`; TRL loads its reference from the same name.'
    >>> find_steps("wrong-reference", None)
    ()
    """
    steps = STEPS.get(trainer or "", {}).get(cause, ())
    if not has_engine:
        return steps
    return tuple(sorted(steps, key=lambda step: not step.startswith(OF_ENGINES)))
