"""Make the run of one thread: python -m bench.reported_bugs THREAD FOLDER [SEED]."""

import argparse
from importlib import import_module
from pathlib import Path


def main() -> None:
    """Train as the thread says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("thread")
    parser.add_argument("folder", type=Path)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    given = parser.parse_args()
    import_module(f"bench.reported_bugs.{given.thread}").train(given.folder, given.seed)


if __name__ == "__main__":
    main()
