"""The parts of TRL that `klinic.attach` uses, and whether a trainer has them.

klinic wraps private methods, which change between versions. It looks for each method and the
parameters that it passes, instead of comparing version numbers: a version that has them all works,
and one that lacks an optional part is attached to with a warning that names it.
"""

import re
from dataclasses import dataclass
from inspect import signature
from typing import Any

from klinic.errors import ConfigError

OLDEST_TESTED, NEWEST_TESTED = (1, 14), (1, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """A method of the trainer that klinic wraps or calls."""

    method: str
    parameters: tuple[str, ...]
    """Parameters, by name, that klinic reads or passes."""
    provides: str
    """What a record lacks without it."""
    is_needed: bool = True
    """Whether no step can be recorded without it."""


CAPABILITIES = (
    Capability(method="_generate", parameters=("prompts",), provides="completions"),
    Capability(
        method="_calculate_rewards", parameters=("inputs", "prompts"), provides="rewards and groups"
    ),
    Capability(
        method="_generate_and_score_completions",
        parameters=("inputs",),
        provides="the rows of a generation",
    ),
    Capability(
        method="_get_per_token_logps_and_entropies",
        parameters=("model", "batch_size"),
        provides="log-probs",
    ),
    Capability(method="_compute_loss", parameters=("model", "inputs"), provides="trained batches"),
    Capability(
        method="_load_optimizer_and_scheduler",
        parameters=("checkpoint",),
        provides="the state of klinic's KL controller when a run resumes",
        is_needed=False,
    ),
    Capability(
        method="_get_tool_suffix_ids",
        parameters=("tool_messages",),
        provides="the template's tokens around tool results: they count as the tool's",
        is_needed=False,
    ),
)
ATTRIBUTES = (
    *("accelerator", "args", "eos_token_ids", "num_generations", "reward_funcs", "reward_weights"),
    *("reward_func_names", "beta", "loss_type", "ref_model", "use_vllm", "_metrics", "_tokenizer"),
)
"""Attributes of the trainer that klinic reads."""


def has_method(trainer: Any, name: str) -> bool:
    """Whether the trainer has a method, with the parameters that klinic uses."""
    capability = next(c for c in CAPABILITIES if c.method == name)
    return _describe_lack(trainer, capability) is None


def warn_about_lacks(trainer: Any, version: str) -> str | None:
    """Return a warning about an untested TRL, or one that lacks optional parts; None if neither.

    Raises ConfigError for a trainer without a part that every record needs.
    """
    lacks = {c: lack for c in CAPABILITIES if (lack := _describe_lack(trainer, c)) is not None}
    needed = [lack for c, lack in lacks.items() if c.is_needed]
    needed += [f"no attribute {name}" for name in ATTRIBUTES if not hasattr(trainer, name)]
    if needed:
        raise ConfigError(
            f"TRL is {version}, and its {type(trainer).__name__} has {', '.join(needed)}: "
            "klinic.attach reads every step there, and no step could be recorded. "
            f"Install a version from {tested_range()}, or record the loop with klinic.Recorder."
        )
    parts = [f"{lack}, so records lack {c.provides}" for c, lack in lacks.items()]
    if is_tested(version):
        return f"TRL {version} has {'; '.join(parts)}." if parts else None
    missing = "; it has " + "; ".join(parts) if parts else ": no method that it needs is missing"
    return (
        f"TRL is {version}, and klinic is tested with {tested_range()}{missing}. Check that a "
        "healthy run has no cause before you trust its findings."
    )


def is_tested(version: str) -> bool:
    """Whether klinic's tests run with a version of TRL.

    >>> is_tested("1.15.0"), is_tested("1.16.0.dev0"), is_tested("1.17.0"), is_tested("unknown")
    (True, True, False, False)
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and OLDEST_TESTED <= (int(found[1]), int(found[2])) <= NEWEST_TESTED


def tested_range() -> str:
    """Return the tested versions.

    >>> tested_range()
    '1.14 to 1.16'
    """
    return " to ".join(".".join(map(str, bound)) for bound in (OLDEST_TESTED, NEWEST_TESTED))


def _describe_lack(trainer: Any, capability: Capability) -> str | None:
    """Return what the trainer lacks of a capability; None if it has all of it.

    Parameters are those of TRL's own class: a subclass may name them otherwise.
    """
    from trl import GRPOTrainer

    method = getattr(GRPOTrainer, capability.method, None)
    if not callable(method) or not callable(getattr(trainer, capability.method, None)):
        return f"no method {capability.method}"
    parameters = signature(method).parameters
    lacking = [name for name in capability.parameters if name not in parameters]
    if not lacking:
        return None
    return f"no parameter {', '.join(lacking)} in {capability.method}"
