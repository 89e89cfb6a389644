"""A process that was started to hold a share of a learner: `python -m klinic.loop.follow`."""

import os
import signal
import sys

from klinic.errors import KlinicError, first_line
from klinic.loop.shards import follow_leader
from klinic.orphans import PARENT, die_with


def main() -> int:
    """Follow until the leader says stop."""
    if leader := os.environ.pop(PARENT, None):  # none under torchrun, which looks after its own
        die_with(int(leader))
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # they are for the leader, who finishes its step first
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
