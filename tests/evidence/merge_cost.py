"""What the parts of many ranks cost: python tests/evidence/merge_cost.py [RANKS]."""

import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from evidence.records import full_record
from klinic.checks import CHECKS
from klinic.doctor.cases import CaseBuilder
from klinic.doctor.diagnosis import Examination
from klinic.evidence import store
from klinic.evidence.part_merging import merge_parts
from klinic.evidence.record import select_rows

ROUNDS = 5


def seconds(call):
    """Return the processor time of a call."""
    begun = time.process_time()
    call()
    return time.process_time() - begun


def write(run, num_ranks):
    whole = full_record(lengths=(400,) * 2 * num_ranks)
    parts = []
    for rank in range(num_ranks):
        rows = select_rows(whole, [2 * rank, 2 * rank + 1])
        parts.append(store.write_part(run, rows, rank))
    store.complete_step(run, 1, parts, whole.facts)


def show(text):
    sys.stdout.write(f"{text}\n")


def judge(run):
    """Read a step and run every check on it."""
    cases, examination = CaseBuilder({}), Examination(CHECKS)
    examination.add_case(cases.next_case(store.read_record(run, 1), {}))


def report(name, values):
    show(f"{name:28} median {np.median(values):.3f} s, of {min(values):.3f} to {max(values):.3f}")


def main():
    num_ranks = int(sys.argv[1]) if sys.argv[1:] else 200
    with tempfile.TemporaryDirectory() as parts, tempfile.TemporaryDirectory() as merged:
        for folder in (parts, merged):
            write(Path(folder), num_ranks)
        size = sum(p.stat().st_size for p in Path(parts).rglob("part-*"))
        show(f"{num_ranks} ranks, {800 * num_ranks:,} tokens, {size / 1e6:.1f} MB")
        show(f"merge: {seconds(lambda: merge_parts(Path(merged), 1)):.3f} s")
        files = len(list(Path(merged).rglob("part-*")))
        size = sum(p.stat().st_size for p in Path(merged).rglob("part-*"))
        show(f"merged: {files} files, {size / 1e6:.1f} MB")
        for name, action in (("read", lambda run: store.read_record(run, 1)), ("judge", judge)):
            times = {"parts": [], "parts again": [], "merged": []}
            for _ in range(ROUNDS):
                for kind, folder in zip(times, (parts, parts, merged), strict=True):
                    times[kind].append(seconds(lambda f=Path(folder), act=action: act(f)))
            for kind, values in times.items():
                report(f"{name} {kind}", values)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
