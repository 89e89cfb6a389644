"""`python -m bench.memory`: peak memory of a run against what `klinic train --dry-run` says of it.

    python -m bench.memory recipe.yaml [key=value ...]

The run is a process of its own, and its peak is the highest resident set size that the kernel saw
(VmHWM). That holds also what the allocator keeps back: glibc returns blocks below its mmap
threshold late, and raises the threshold while a process runs. So the run is made twice: with the
threshold held at 128 KiB, where what is resident is in use, and as it comes (`--once`: only the
first).
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

MB = 2**20
KLINIC = str(Path(sys.executable).with_name("klinic"))
ONCE = "--once"
IN_USE = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**17)}
ALLOCATORS: dict[str, dict[str, str]] = {"in use": IN_USE, "as it comes": {}}


def predicted(arguments: list[str]) -> int:
    """Return the bytes that a dry run names."""
    done = subprocess.run(  # noqa: S603
        [KLINIC, "train", *arguments, "--dry-run", "--json"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return int(json.loads(done.stdout)["memory"]["peak"]["bytes"])


def measured(arguments: list[str], environment: dict[str, str]) -> int:
    """Return the highest resident set size of a run, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.Popen(  # noqa: S603
            [KLINIC, "train", *arguments, f"output.dir={folder}/run"],
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(run.pid, 0)
    if status:
        sys.exit(f"The run ended with {os.waitstatus_to_exitcode(status)}.")
    return usage.ru_maxrss * 1024


def main(arguments: list[str]) -> None:
    """Print a row: what was changed, megabytes predicted and measured, and their ratios."""
    once = ONCE in arguments
    arguments = [word for word in arguments if word != ONCE]
    expected = predicted(arguments)
    cells = [" ".join(arguments), f"predicted {expected / MB:.0f}"]
    for name, environment in ALLOCATORS.items():
        if once and environment is not IN_USE:
            continue
        found = measured(arguments, environment)
        cells += [f"{name} {found / MB:.0f}", f"ratio {expected / found:.2f}"]
    Console(highlight=False, soft_wrap=True).print(f"| {' | '.join(cells)} |", markup=False)


if __name__ == "__main__":
    main(sys.argv[1:])
