"""Every error klinic raises on purpose.

Each says where, what was found, why it cannot work, and what to do. Each is also the standard
exception a caller would expect, and each survives pickling, since workers send errors to a driver.
To add one: subclass `KlinicError` and a standard exception, and take the message as only argument.
"""


class KlinicError(Exception):
    """The root: `except KlinicError` catches what klinic says, and nothing else."""

    exit_code = 2
    """What a command that ends with it exits with."""


class ConfigError(KlinicError, ValueError):
    """A setting cannot work, alone or together with another one."""


class ShapeError(KlinicError, ValueError):
    """Arrays that must lie over the same tokens or rows do not."""


class FunctionError(KlinicError, ValueError):
    """A function named by the user cannot be found, called or understood."""


class MissingExtraError(KlinicError, ImportError):
    """A command needs an optional part of klinic that is not installed."""


class EvidenceError(KlinicError, ValueError):
    """What a run left behind is missing, broken or contradicts itself."""


class CheckpointError(KlinicError, ValueError):
    """A checkpoint cannot be read, or is not of this run."""


class DataError(KlinicError, ValueError):
    """A row of a dataset cannot be used."""


class PolicyError(KlinicError, RuntimeError):
    """The policy has become unusable."""


class LogitsError(PolicyError):
    """The policy's logits are not numbers."""


class RunStoppedError(KlinicError, RuntimeError):
    """A run was stopped because it could not be brought back to health."""

    exit_code = 1


class LostError(KlinicError, RuntimeError):
    """A process that the run cannot do without is gone: the run can go on with --resume."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again later


class RankLostError(LostError):
    """Another process of the same learner is gone."""


class SamplerError(KlinicError, RuntimeError):
    """The engine that samples cannot do what is asked of it."""


class WorkerLostError(LostError):
    """Processes of a cluster are gone, and no others come."""


class EngineLostError(SamplerError, LostError):
    """The engine that samples is gone."""


class MachineError(KlinicError, OSError):
    """The machine cannot do what a command needs: no room, no memory, no permission, no file."""

    exit_code = 4


class UnreadableError(EvidenceError, MachineError):
    """A file that a run left behind is there, and the machine does not let it be read."""

    exit_code = 4


class UnfinishedError(KlinicError, RuntimeError):
    """The process of a run exited on its own before the last step was saved."""


class RewardError(KlinicError, ValueError):
    """A reward function failed, or returned what is not a reward."""


def text_of(error: BaseException) -> str:
    """Return the text of an error that is not ours; its `__str__` may itself raise.

    >>> class Broken(Exception):
    ...     def __str__(self):
    ...         raise KeyError("no text")
    >>> text_of(ValueError("wrong")), text_of(Broken())
    ('wrong', '(no text: its __str__ raised KeyError)')
    """
    try:
        return str(error)
    except Exception as raised:  # code of a user, in the text of an error as anywhere else
        return f"(no text: its __str__ raised {type(raised).__name__})"


def first_line(error: BaseException) -> str:
    """Return the first line of an error that is not ours; its type where it has no text.

    >>> first_line(ValueError("wrong\\nand more"))
    'wrong'
    """
    lines = text_of(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
