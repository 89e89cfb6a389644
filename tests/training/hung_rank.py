"""Two ranks of a learner whose collectives may take 2 seconds; this file is run once for each.

python hung_rank.py RANK STORE: rank 0 is busy for longer than that, makes a call that both execute,
and one in which rank 1 hangs. It prints the error and the seconds until it came.
"""

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from klinic.errors import RankLostError
from klinic.learner.fsdp import TorchProcessGroup
from klinic.learner.rpc import Rank0Learner, serve_calls
from klinic.training.learner_processes import STORE_VARIABLE, _join_process_group, open_call_channel

LIMIT = timedelta(seconds=2)


class SumLearner:
    """A learner whose only call is a collective; on rank 1 the second call hangs."""

    def __init__(self):
        self.group = TorchProcessGroup()
        self._num_calls = 0

    def publish(self):
        self._num_calls += 1
        if self.group.rank == 1 and self._num_calls == 2:
            time.sleep(600)
        return self.group.all_reduce_sum(torch.ones(3)).tolist()


def main(rank, store):
    os.environ |= {"RANK": rank, "WORLD_SIZE": "2", STORE_VARIABLE: store}
    _join_process_group(threads=1, timeout=LIMIT)
    channel = open_call_channel(LIMIT)
    if rank == "1":
        serve_calls(SumLearner(), channel, {})
        return
    time.sleep(1.5 * LIMIT.total_seconds())  # rank 1 waits for longer than a collective may take
    learner = Rank0Learner(SumLearner(), channel)
    found = {"sum": learner.publish()}
    began = time.monotonic()
    try:
        learner.publish()
    except RankLostError as error:
        found |= {"error": str(error), "seconds": time.monotonic() - began}
    sys.stdout.write(json.dumps(found))
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
