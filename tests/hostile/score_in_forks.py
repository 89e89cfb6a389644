"""Scores three batches with each reward named on the command line, each in a fork of this process.

Prints one JSON object: by reward, what its process printed and how it ended.
"""

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from klinic.rewards.function import Reward
from klinic.rewards.runner import score
from klinic.training.run_folder import lock_folder
from rewards.rollouts import rollout

ROWS = [rollout(text, index=i // 2) for i, text in enumerate(["a", "bb", "ccc", "dddd"])]
LIMIT = 20.0  # seconds


def misbehave(name: str, folder: Path) -> None:
    """Score as a run does: with its lock held."""
    before = Path.cwd(), signal.getsignal(signal.SIGTERM)
    function = getattr(importlib.import_module("hostile.bad_rewards"), name)
    with lock_folder(folder):
        for _ in range(3):
            score(ROWS, [Reward(name=name, function=function)])
    after = Path.cwd(), signal.getsignal(signal.SIGTERM)
    if after == before:
        os.write(2, b"WELL\n")


def run(name: str) -> dict[str, object]:
    """Return what a reward's process printed, and its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder, "printed")
        pid = os.fork()
        if pid == 0:
            for number in (1, 2):
                os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            try:
                misbehave(name, Path(folder))
            except BaseException as error:  # as the top of the command line does
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(5)
        deadline, ended = time.monotonic() + LIMIT, 0
        while not ended and time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)
        if not ended:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        time.sleep(0.05)  # for a fork of the reward's to say something
        with printed.open("rb") as file:
            file.seek(max(0, printed.stat().st_size - 3000))
            said = file.read().decode(errors="replace")
        size = printed.stat().st_size
        return {"code": os.waitstatus_to_exitcode(status), "said": said, "size": size}


if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: run(name) for name in sys.argv[1:]}))
