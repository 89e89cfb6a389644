"""`python tests/lab/bundles.py OUT`: compares runs of the scoreboard with their bundles.

It trains the trials of one seed, writes a bundle of each, and compares the verdicts and the status
of every check; then it looks for texts of the run in the bundle. Each outcome is one line of
OUT/outcomes.jsonl; a trial that has a line is left out. Runs and bundles are kept: without
OUT/outcomes.jsonl, runs that were trained are compared again.
"""

import argparse
import getpass
import io
import json
import re
import socket
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from klinic.checks import CHECKS
from klinic.cli.bundle import short_verdict
from klinic.doctor.cases import read_cases
from klinic.doctor.diagnosis import diagnose
from klinic.evidence import store
from klinic.evidence.bundle import unpack_bundle, write_bundle
from klinic.evidence.files import Journal, json_bytes
from klinic.evidence.record import StepRecord
from klinic.evidence.run_facts import read_tokens
from klinic.evidence.writing import open_log
from klinic.faults import Severity
from klinic.lab import healthy_recipes
from klinic.lab.scoreboard import Trial, find_fault, list_trials
from klinic.lab.scoreboard_run import train_trial

MIN_TEXT = 4  # characters of a text that is looked for: shorter ones occur by chance
WORDS = ("arithmetic", "graduated", "tiny", "secret", "http", "/tmp", "/home", "/root", "2026-")  # noqa: S108

FRACTION = re.compile(r"(?<=[\s,:\[])-?\d+\.\d+([eE][-+]?\d+)?(?=[\s,\]}])")  # a JSON number


def order_trials(seed_trials: Sequence[Trial]) -> list[Trial]:
    """Return normal faults before mild ones and healthy runs, the second mechanisms first."""
    return sorted(
        seed_trials, key=lambda t: (t.mechanism == 0, t.severity != "normal", -t.mechanism)
    )


def compare_trial(trial: Trial, folder: Path) -> dict[str, Any]:
    """Train a trial, unless its run is kept, and compare the run with its bundle."""
    fault, began = find_fault(trial), time.monotonic()
    settings = healthy_recipes.VARIANTS[trial.severity] if fault is None else {}
    severity = Severity.NORMAL if fault is None else Severity(trial.severity)
    finished = folder / "trained"
    if not finished.is_file():
        train_trial(folder, fault, severity=severity, seed=trial.seed, **settings)
        finished.touch()
    diagnosis = diagnose(read_cases(folder), CHECKS)
    anchors = [h.first_step for h in diagnosis.hypotheses if h.first_step is not None]
    contents = write_bundle(folder, folder.with_suffix(".zip"), verdict={}, anchors=anchors)
    with unpack_bundle(contents.path) as unpacked:
        again = diagnose(read_cases(unpacked), CHECKS)
    statuses = ([str(h.status) for h in one.hypotheses] for one in (diagnosis, again))
    return {
        "cause": trial.cause,
        "mechanism": trial.mechanism,
        "severity": trial.severity,
        "named": diagnosis.cause,
        "same_verdict": short_verdict(again) == short_verdict(diagnosis),
        "same_checks": len({tuple(status) for status in statuses}) == 1,
        "found_texts": sorted(find_texts(folder, contents.path)),
        "bytes": contents.num_bytes,
        "seconds": time.monotonic() - began,
    }


def find_texts(run: Path, bundle: Path) -> set[str]:
    """Return the texts, names and paths of a run that its bundle has."""
    known = "\n".join(_bundle_texts(bundle))
    wanted = {*_run_texts(run), *WORDS, str(run), socket.gethostname(), getpass.getuser()}
    return {text for text in wanted if len(text) >= MIN_TEXT and text in known}


def _run_texts(run: Path) -> Iterator[str]:
    """Yield the prompts and completions of a run."""
    texts = read_tokens(run)
    for step in store.complete_steps(run):
        record = store.read_record(run, step)
        for offsets, ids in _id_columns(record):
            for first, last in pairwise(offsets.tolist()):
                yield "".join(texts.get(int(i), "") for i in ids[first:last])


def _id_columns(record: StepRecord) -> Iterator[tuple[Any, Any]]:
    yield record.row_offsets, record.token_ids
    if record.prompt_offsets is not None and record.prompt_ids is not None:
        yield record.prompt_offsets, record.prompt_ids


def _bundle_texts(bundle: Path) -> Iterator[str]:
    """Yield the JSON of a bundle, and the names, metadata and text columns of its tables.

    Digits of fractions are left out: a completion of eight digits is in some fraction by chance.
    """
    with zipfile.ZipFile(bundle) as file:
        for name in file.namelist():
            data = file.read(name)
            if not name.endswith(".parquet"):
                yield FRACTION.sub("0.", data.decode("utf-8", "replace"))
                continue
            table = pq.read_table(io.BytesIO(data))
            yield str(table.schema.to_string(show_field_metadata=True, truncate_metadata=False))
            for column in table.columns:
                if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
                    yield "\n".join(map(str, column.to_pylist()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the trials that are missing and print the sums."""
    parser = argparse.ArgumentParser(prog="python tests/lab/bundles.py", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--most", type=int, help="number of trials, at most")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "outcomes.jsonl"
    done = [dict(entry) for entry in Journal(log).entries()]
    seen = {(one["cause"], one["mechanism"], one["severity"]) for one in done}
    trials = order_trials(list(list_trials([], 1, [str(s) for s in Severity])))
    for number, trial in enumerate(trials[: options.most]):
        if (trial.cause, trial.mechanism, trial.severity) in seen:
            continue
        done.append(compare_trial(trial, options.out / f"run-{number:03d}"))
        with open_log(log) as file:
            file.write(json_bytes(done[-1]) + b"\n")
    sums = {key: sum(one[key] for one in done) for key in ("same_verdict", "same_checks")}
    found = sum(bool(one["found_texts"]) for one in done)
    result = {"trials": len(trials), "compared": len(done), **sums, "with_texts": found}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
