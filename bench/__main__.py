"""`python -m bench NAME` or `all`: measured ratios; `--json`, and `--out` for raw files."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from bench.catalogue import BENCHES
from bench.harness import versions
from bench.table import table


def main() -> None:
    """Measure what is asked for, and print one table."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", choices=[*BENCHES, "all"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="a folder for the raw seconds of every round")
    parser.add_argument("--seconds", type=float, default=600.0, help="for each measurement")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    ratios: dict[str, Any] = {}
    for name in BENCHES if given.name == "all" else [given.name]:
        load = os.getloadavg()[0]
        print(f"{name} (load {load:.2f})", file=sys.stderr, flush=True)  # noqa: T201
        found = BENCHES[name](seconds=given.seconds, tell=_tell)
        ratios |= found["ratios"]
        if given.out is not None:
            given.out.mkdir(parents=True, exist_ok=True)
            facts = {"versions": versions(), "threads": given.threads, "load": load}
            (given.out / f"{name}.json").write_text(json.dumps(facts | found, indent=1))
    print(json.dumps({"ratios": ratios}) if given.json else table(ratios))  # noqa: T201


def _tell(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
