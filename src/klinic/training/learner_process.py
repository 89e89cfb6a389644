"""Entry point of a learner rank above 0: `python -m klinic.training.learner_process`."""

import os
import signal
import sys

from klinic.errors import KlinicError, first_line
from klinic.runtime.process_tree import PARENT_PID_VARIABLE, die_with_parent
from klinic.training.learner_processes import run_learner_rank


def main() -> int:
    """Execute calls from rank 0 until it stops."""
    if parent_pid := os.environ.pop(
        PARENT_PID_VARIABLE, None
    ):  # unset under torchrun, which kills its own children
        die_with_parent(int(parent_pid))
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # rank 0 handles them after its step
    try:
        run_learner_rank()
    except KlinicError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        sys.stderr.write(f"process {os.environ.get('RANK')} of the learner: {reason}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
