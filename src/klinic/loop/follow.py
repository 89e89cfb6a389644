"""Entry point of a learner rank above 0: `python -m klinic.loop.follow`."""

import os
import signal
import sys

from klinic.errors import KlinicError, first_line
from klinic.loop.shards import follow_leader
from klinic.orphans import PARENT, die_with


def main() -> int:
    """Execute calls from rank 0 until it stops."""
    if leader := os.environ.pop(PARENT, None):  # unset under torchrun, which kills its own children
        die_with(int(leader))
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # rank 0 handles them after its step
    try:
        follow_leader()
    except KlinicError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except Exception as error:
        says = f"{type(error).__name__}: {first_line(error)}"
        sys.stderr.write(f"process {os.environ.get('RANK')} of the learner: {says}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
