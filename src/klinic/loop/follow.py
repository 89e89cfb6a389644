"""A process that was started to hold a share of a learner: `python -m klinic.loop.follow`."""

import os
import signal
import sys

from klinic.errors import KlinicError
from klinic.loop.shards import follow_leader


def main() -> int:
    """Follow until the leader says stop."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # they are for the leader, who finishes its step first
    try:
        follow_leader()
    except KlinicError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except Exception as error:
        rank, first = os.environ.get("RANK"), (str(error).strip().splitlines() or [""])[0]
        sys.stderr.write(f"process {rank} of the learner: {type(error).__name__}: {first}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
