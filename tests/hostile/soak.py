"""Train for hours while the run is killed every few minutes, beside one that is not.

    python tests/hostile/soak.py FOLDER --minutes 120 --seed 0

FOLDER/disturbed: every 2 to 5 minutes its process is killed with SIGKILL, one time in three with
its supervisor, and it is resumed. FOLDER/undisturbed trains beside it. When the time is over, the
disturbed run is stopped with SIGTERM and resumed beyond its next checkpoint; the other is stopped
as soon as it is there. Everything up to that checkpoint is compared byte for byte. Every 10 seconds
the resident memory and the open descriptors of both are sampled: samples.csv, drawn in soak.png.
"""

import argparse
import csv
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from killed_commands import RECIPE, kill, start
from run_differences import Part, evidence_differences
from training.killing import process_of

EVERY = 10.0  # seconds between two samples
PAUSES = (120.0, 300.0)  # seconds between two kills
SAVED_EVERY = 25  # steps
LONG = RECIPE.replace("max_steps: 16", "max_steps: 1000000").replace(
    "checkpoint_every: 3, eval_every: 5",
    f"checkpoint_every: {SAVED_EVERY}, eval_every: {SAVED_EVERY}, keep_checkpoints: 100000",
)


def main() -> int:
    """Run the soak; return 0 where both runs left the same bytes."""
    options = argparse.ArgumentParser()
    options.add_argument("folder", type=Path)
    options.add_argument("--minutes", type=float, default=120.0)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--kill-every", type=float, nargs=2, default=PAUSES)
    given = options.parse_args()
    folder: Path = given.folder.resolve()
    arms = [Arm(folder / name, folder / "cache") for name in ("disturbed", "undisturbed")]
    soak = Soak(*arms, samples=folder / "samples.csv", seed=given.seed)
    try:
        soak.disturb(60 * given.minutes, tuple(given.kill_every))
        stopped, last = soak.finish()
    finally:
        for arm in arms:
            arm.process.kill()
    whole = f"{soak.whole} of them with the supervisor"
    say(f"{soak.kills} kills, {whole}; stopped after step {stopped}, resumed to step {last}")
    found = evidence_differences(
        arms[0].run, arms[1].run, Part(until=last, saved_every=SAVED_EVERY)
    )
    say(f"compared up to step {last}: {len(found)} differences {found[:20]}")
    draw(folder / "samples.csv", soak.moments, folder / "soak.png")
    return 1 if found else 0


def say(text: str) -> None:
    """Print a line with the time."""
    print(time.strftime("%H:%M:%S"), text, flush=True)  # noqa: T201 - the script's output


class Arm:
    """One of the two runs, and the command that trains it."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.run, self._cache = folder, folder / "run", cache
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(LONG)
        self.process = start(folder, cache)

    def resume(self) -> None:
        """Start it again."""
        self.process = start(self.folder, self._cache, "--resume")

    def pid(self) -> int | None:
        """Return the process that trains, if there is one."""
        try:
            pid = process_of(self.run)
        except (OSError, ValueError):
            return None
        return pid if Path(f"/proc/{pid}/fd").exists() else None

    def step(self) -> int:
        """Return the last step that was written down."""
        path = self.run / "metrics.jsonl"
        if not path.exists():
            return 0
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 20_000))
            lines = file.read().split(b"\n")
        whole = [line for line in lines if line.startswith(b'{"step"') and line.endswith(b"}")]
        return int(json.loads(whole[-1])["step"]) if whole else 0

    def stop(self) -> None:
        """Stop it with SIGTERM once it trains: before, there is nothing to save."""
        pid, before = None, 0
        while pid is None or pid != self.pid() or self.step() <= before:
            pid, before = self.pid(), self.step()
            time.sleep(2.0)
        self.process.send_signal(signal.SIGTERM)
        if (code := self.process.wait()) != 128 + signal.SIGTERM:
            raise AssertionError(f"{self.folder.name}: exit code {code} after SIGTERM")


class Soak:
    """When the disturbed run is killed, and what both hold meanwhile."""

    def __init__(self, disturbed: Arm, undisturbed: Arm, *, samples: Path, seed: int) -> None:
        self._disturbed, self._undisturbed = disturbed, undisturbed
        self._samples = samples
        self._random = random.Random(seed)  # noqa: S311 - moments, not secrets
        self._begun = time.monotonic()
        self.kills = self.whole = 0
        self.moments: list[float] = []
        with samples.open("w") as file:
            csv.writer(file).writerow(["seconds", "run", "pid", "rss_mb", "descriptors", "step"])

    def disturb(self, seconds: float, pauses: tuple[float, float]) -> None:
        """Kill and resume the one run until the time is over."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._sample_for(min(left, self._random.uniform(*pauses)))
            if time.monotonic() < until:
                self._kill(self._disturbed)

    def finish(self) -> tuple[int, int]:
        """Stop the disturbed run and resume it beyond its next checkpoint, the other as well.

        Return where it was stopped, and the step of that checkpoint.
        """
        self._disturbed.stop()
        stopped = self._disturbed.step()
        last = (stopped // SAVED_EVERY + 1) * SAVED_EVERY
        self._disturbed.resume()
        for arm in (self._disturbed, self._undisturbed):
            while arm.step() <= last:
                self._sample_for(EVERY)
            arm.stop()
        return stopped, last

    def _kill(self, arm: Arm) -> None:
        whole = self._random.randrange(3) == 0
        while arm.pid() is None:  # it is still being started
            time.sleep(1.0)
        for one in (self._disturbed, self._undisturbed):
            if one.process.poll() is not None:
                raise AssertionError(f"{one.folder.name} ended: {one.process.returncode}")
        with_whom = " with its supervisor" if whole else ""
        say(f"kill behind step {arm.step()}{with_whom}; the other: {self._undisturbed.step()}")
        kill(arm.process, arm.run, whole=whole)
        self.kills += 1
        self.whole += whole
        self.moments.append(time.monotonic() - self._begun)
        if whole:
            arm.process.wait()
            arm.resume()

    def _sample_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(EVERY, left))
            for arm in (self._disturbed, self._undisturbed):
                self._sample(arm)

    def _sample(self, arm: Arm) -> None:
        pid = arm.pid()
        try:
            descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:  # it has just been killed
            return
        rss = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")]
        seconds = round(time.monotonic() - self._begun, 1)
        with self._samples.open("a") as file:
            for kilobytes in rss:
                row = [seconds, arm.folder.name, pid, kilobytes / 1024, descriptors, arm.step()]
                csv.writer(file).writerow(row)


def draw(samples: Path, moments: list[float], picture: Path) -> None:
    """Draw resident memory and open descriptors of both runs against time."""
    import matplotlib.pyplot as plt

    with samples.open() as file:
        rows = list(csv.DictReader(file))
    figure, axes = plt.subplots(2, 1, sharex=True, figsize=(9, 5), layout="constrained")
    shown = {"rss_mb": "resident memory, MB", "descriptors": "open descriptors"}
    for axis, (name, label) in zip(axes, shown.items(), strict=True):
        for run in ("disturbed", "undisturbed"):
            own = [row for row in rows if row["run"] == run]
            minutes = [float(row["seconds"]) / 60 for row in own]
            axis.plot(minutes, [float(row[name]) for row in own], ".", markersize=3, label=run)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        for moment in moments:
            axis.axvline(moment / 60, color="tab:red", linewidth=0.5)
    axes[0].legend(loc="lower right")
    axes[1].set_xlabel("minutes; a red line is a kill")
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    raise SystemExit(main())
