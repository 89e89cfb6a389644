"""`klinic train` with a cluster, under way: who is in it, how far it is, and how it ends."""

import json
import subprocess
import time
from pathlib import Path

from killing import command, environment, num_steps

from klinic.runtime.process_tree import descendant_pids

SAMPLER, LEARNER = "ray::SamplerWorker", "ray::LearnerWorker"
RAYLET = "raylet"


def until(holds, seconds):
    """Wait until something holds; return whether it came to, in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.02)
    return False


def title(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


class Started:
    """A run in a folder that holds its recipe."""

    def __init__(self, folder, cache, *more, supervised=False):
        self.run = folder / "run"
        self._said = folder / "out.txt"
        with self._said.open("w") as out:
            self.process = subprocess.Popen(
                command(folder, *more),
                env=environment(cache, supervised=supervised),
                stdout=out,
                stderr=out,
            )

    def everybody(self):
        return {self.process.pid} | descendant_pids(self.process.pid)

    def named(self, start):
        """Return the processes of the run whose command is called so."""
        return sorted(
            pid
            for pid in self.everybody()
            if title(pid).startswith(start) or Path(title(pid).partition("\0")[0]).name == start
        )

    def reaches(self, step, seconds=240.0):
        """Wait until a step is written down; return when it was."""
        there = until(
            lambda: num_steps(self.run) >= step or self.process.poll() is not None, seconds
        )
        assert there, self.said()
        assert self.process.poll() is None, self.said()
        return time.monotonic()

    def said(self):
        return self._said.read_text()

    def ends(self, seconds=400.0):
        try:
            self.process.wait(seconds)
        finally:
            self.process.kill()
        assert self.process.returncode == 0, self.said()

    def events(self):
        path = self.run / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]
