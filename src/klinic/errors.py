"""Exceptions that klinic raises on purpose.

A message states where, the offending value, why it cannot work, and what to do. Each class is also
the standard exception that a caller expects, and survives pickling, since workers send errors to a
driver. To add one: subclass `KlinicError` and a standard exception; the message is the only
argument.
"""


class KlinicError(Exception):
    """Base class: `except KlinicError` catches every error that klinic raises on purpose."""

    exit_code = 2
    """Exit code of a command that ends with this error."""


class ConfigError(KlinicError, ValueError):
    """A setting cannot work, alone or in combination with another one."""


class ShapeError(KlinicError, ValueError):
    """Arrays that must cover the same tokens or rows differ in shape."""


class FunctionError(KlinicError, ValueError):
    """A user-supplied function cannot be found, called or understood."""


class MissingExtraError(KlinicError, ImportError):
    """A command needs an optional dependency of klinic that is not installed."""


class EvidenceError(KlinicError, ValueError):
    """Recorded evidence of a run is missing, corrupt or contradictory."""


class CheckpointError(KlinicError, ValueError):
    """A checkpoint cannot be read, or belongs to another run."""


class DataError(KlinicError, ValueError):
    """A row of a dataset cannot be used."""


class PolicyError(KlinicError, RuntimeError):
    """The policy has become unusable."""


class LogitsError(PolicyError):
    """The policy's logits are not finite."""


class RunStoppedError(KlinicError, RuntimeError):
    """A run was stopped because recovery failed."""

    exit_code = 1


class LostError(KlinicError, RuntimeError):
    """A process that the run needs has died; the run can continue with --resume."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again later


class RankLostError(LostError):
    """Another rank of the same learner has died."""


class SamplerError(KlinicError, RuntimeError):
    """The sampling engine cannot perform a request."""


class WorkerLostError(LostError):
    """Workers of a cluster have died, and no replacements arrive."""


class EngineLostError(SamplerError, LostError):
    """The sampling engine has died."""


class MachineError(KlinicError, OSError):
    """The machine lacks a resource that a command needs: disk, memory, permission, file."""

    exit_code = 4


class UnreadableError(EvidenceError, MachineError):
    """A file of recorded evidence exists, and the machine refuses to read it."""

    exit_code = 4


class UnfinishedError(KlinicError, RuntimeError):
    """The process of a run exited before the last step was saved."""


class RewardError(KlinicError, ValueError):
    """A reward function failed, or returned an invalid reward."""


def error_text(error: BaseException) -> str:
    """Return the text of a foreign error; its `__str__` may itself raise.

    >>> class Broken(Exception):
    ...     def __str__(self):
    ...         raise KeyError("no text")
    >>> error_text(ValueError("wrong")), error_text(Broken())
    ('wrong', '(no text: its __str__ raised KeyError)')
    """
    try:
        return str(error)
    except Exception as raised:  # __str__ is user code
        return f"(no text: its __str__ raised {type(raised).__name__})"


def first_line(error: BaseException) -> str:
    """Return the first line of a foreign error; its type name if it has no text.

    >>> first_line(ValueError("wrong\\nand more"))
    'wrong'
    """
    lines = error_text(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
