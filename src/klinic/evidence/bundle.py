"""Bundles: the evidence of a run in one file for a bug report, without texts, names and paths.

    bundle.json                              version of the format, verdict of the whole run
    run.json, metrics.jsonl, probes.jsonl    what `redaction` passes on of them
    records/step=000123/...                  redacted records, as in a run folder

A bundle is read from people one does not know: its members have one of these names or the file is
refused, and they are unpacked under names that are made here.
"""

import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klinic.errors import EvidenceError
from klinic.evidence import store
from klinic.evidence.bundle_head import HEAD
from klinic.evidence.files import Journal, json_bytes, parse_object, read_bytes
from klinic.evidence.redaction import (
    Redaction,
    column_names,
    left_out_keys,
    redact_metrics,
    redact_probe,
)
from klinic.evidence.run_facts import METRICS, PROBES, RUN_FACTS, read_run_facts, write_run_facts
from klinic.evidence.stored_zip import pack_files, read_members
from klinic.evidence.writing import write_atomically, write_new

FORMAT = 1
LARGEST_RECORDS = 20 << 20  # bytes: trackers of bugs take files of 25 MB
LARGEST_JOURNAL = 2 << 20  # bytes of a journal that are passed on
LARGEST_BUNDLE = 128 << 20  # bytes that are written or read
MEMBER = re.compile(
    r"run\.json|metrics\.jsonl|probes\.jsonl"
    r"|records/step=([0-9]{6,12})/(complete\.json|part-[0-9]{5}\.parquet)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleContents:
    """What was written, to be shown before it is sent."""

    path: Path
    num_bytes: int
    steps: list[int]
    num_recorded: int
    """Number of steps that the run has."""
    num_rows: int
    num_tokens: int
    columns: list[str]
    facts: list[str]
    run_keys: list[str]
    left_out: list[str]
    """Keys of run.json that are not passed on."""
    metrics: list[str]
    probes: list[str]


def write_bundle(
    run: Path, out: Path, *, verdict: Mapping[str, Any], anchors: Sequence[int]
) -> BundleContents:
    """Write the bundle of a run with records.

    If they are too large, it has the steps nearest to the first, to the last and to `anchors`.
    """
    facts = read_run_facts(run) if (run / RUN_FACTS).exists() else {}
    with tempfile.TemporaryDirectory(prefix="klinic-bundle-") as folder:
        draft = Path(folder)
        redaction = Redaction(facts)
        passed = redaction.run_facts()
        if facts:
            write_run_facts(draft, passed)
        metrics = _journal_lines(run / METRICS, redact_metrics)
        probes = _journal_lines(run / PROBES, redact_probe)
        for name, lines in ((METRICS, metrics), (PROBES, probes)):
            write_new(draft / name, b"".join(json_bytes(line) + b"\n" for line in lines))
        records = _write_records(run, draft, redaction, anchors)
        head = {
            "bundle": FORMAT,
            "klinic": passed.get("klinic"),
            "steps": len(records.steps),
            "recorded": records.num_recorded,
            "verdict": dict(verdict),
        }
        names = sorted(p.relative_to(draft).as_posix() for p in draft.rglob("*") if p.is_file())
        files = ((name, (draft / name).read_bytes()) for name in names)
        data = pack_files([(HEAD, json_bytes(head) + b"\n"), *files])
    if len(data) > LARGEST_BUNDLE:
        raise EvidenceError(
            f"{run}: the records of {len(records.steps)} steps take {len(data) >> 20} MB, and a "
            f"bundle has at most {LARGEST_BUNDLE >> 20} MB. Record a run with fewer completions."
        )
    write_atomically(out, data)
    return BundleContents(
        path=out,
        num_bytes=len(data),
        steps=sorted(records.steps),
        num_recorded=records.num_recorded,
        num_rows=records.num_rows,
        num_tokens=records.num_tokens,
        columns=sorted(records.columns),
        facts=sorted(records.facts),
        run_keys=sorted(passed),
        left_out=left_out_keys(facts),
        metrics=sorted({name for line in metrics for name in line} - {"step"}),
        probes=sorted({line["probe"] for line in probes}),
    )


class _WrittenRecords:
    """Counts what is written of the records."""

    def __init__(self, num_recorded: int) -> None:
        self.num_recorded = num_recorded
        self.steps: list[int] = []
        self.num_rows = self.num_tokens = self.num_bytes = 0
        self.columns: set[str] = set()
        self.facts: set[str] = set()


def _write_records(
    run: Path, draft: Path, redaction: Redaction, anchors: Sequence[int]
) -> _WrittenRecords:
    steps = store.complete_steps(run)
    result = _WrittenRecords(len(steps))
    for step in _by_distance(steps, [steps[0], steps[-1], *anchors]):
        record = redaction.record(store.read_record(run, step))
        store.write_record(draft, record)
        folder = store.step_folder(draft, step)
        result.num_bytes += sum(path.stat().st_size for path in folder.iterdir())
        result.steps.append(step)
        result.num_rows += record.num_rows
        result.num_tokens += record.num_tokens
        result.columns |= set(column_names(record))
        result.columns |= {"reward_parts"} if record.reward_parts else set()
        result.facts |= set(record.facts)
        if result.num_bytes > LARGEST_RECORDS:
            break
    return result


def _by_distance(steps: Sequence[int], anchors: Sequence[int]) -> list[int]:
    """Return the steps, those nearest to an anchor first.

    >>> _by_distance(range(1, 10), [1, 6])
    [1, 6, 2, 5, 7, 3, 4, 8, 9]
    """
    return sorted(steps, key=lambda step: (min(abs(step - anchor) for anchor in anchors), step))


def _journal_lines(
    path: Path, redact: Callable[[Mapping[str, Any]], dict[str, Any] | None]
) -> list[dict[str, Any]]:
    """Return the redacted lines of a journal; of a long one its beginning and its end."""
    first: list[dict[str, Any]] = []
    last: deque[tuple[int, dict[str, Any]]] = deque()
    first_size = last_size = 0
    for entry in Journal(path).entries():
        line = redact(entry)
        if line is None:
            continue
        size = len(json_bytes(line))
        if first_size < LARGEST_JOURNAL // 2:
            first_size += size
            first.append(line)
            continue
        last.append((size, line))
        last_size += size
        while last_size > LARGEST_JOURNAL // 2:
            last_size -= last.popleft()[0]
    return [*first, *(line for _, line in last)]


def read_head(path: Path) -> dict[str, Any]:
    """Return bundle.json; raise `EvidenceError` if a newer klinic wrote it."""
    data = read_bytes(path, largest=LARGEST_BUNDLE)
    first = next(iter(read_members(data, path)), None)
    head = {} if first is None else parse_object(bytes(first.data), path)
    if head.get("bundle") != FORMAT:
        raise EvidenceError(
            f"{path}: has format {str(head.get('bundle'))[:20]}, but this klinic reads bundles of "
            f"format {FORMAT}. Update klinic."
        )
    return head


@contextmanager
def unpack_bundle(path: Path) -> Iterator[Path]:
    """Yield a temporary run folder with the files of a bundle; it is removed afterwards."""
    read_head(path)
    _, *members = read_members(read_bytes(path, largest=LARGEST_BUNDLE), path)
    for member in members:
        if MEMBER.fullmatch(member.name) is None:
            raise EvidenceError(
                f"{path}: holds {member.name[:80]!r}, and a bundle has no such file. Make it again "
                "with `klinic bundle RUN`."
            )
    with tempfile.TemporaryDirectory(prefix="klinic-bundle-") as folder:
        for member in members:
            target = Path(folder, *member.name.split("/"))
            target.parent.mkdir(parents=True, exist_ok=True)
            write_new(target, bytes(member.data))
        yield Path(folder)
