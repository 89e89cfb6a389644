"""Publishes the state of a local run at a URL, in a thread beside the training.

The training thread captures a state between two steps: the bytes of the files that change, and the
names of those that do not. The other thread writes what is not there yet, and then the manifest.
Before the run removes or rewinds anything it waits for that thread (`wait`).
"""

import hashlib
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from klinic.errors import EvidenceError, MachineError, UnreadableError
from klinic.evidence import store as records
from klinic.evidence.files import json_bytes, parse_object, read_bytes, sha256_of
from klinic.evidence.remote.object_store import ObjectStore
from klinic.evidence.remote.snapshot import (
    DATA,
    FILE_NAME,
    JOURNALS,
    SINGLE_FILES,
    Snapshot,
    is_growing,
    manifest_names,
    newest_snapshot,
    object_name,
    split_pieces,
    write_snapshot,
)
from klinic.evidence.schema import CHECKPOINTS
from klinic.evidence.writing import write_atomically

PUBLISHED = "published.json"  # in the run folder: which process published its state
INTERVAL = 30.0  # seconds between two published states without a checkpoint
NUM_KEPT = 3  # manifests, so that a reader of an older one finds its files
LARGEST_GROWING = 1 << 30  # bytes of a journal
FileStamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedState:
    """The state of a run between two steps."""

    contents: Mapping[str, bytes]
    """The files that may change, by name."""
    fixed: tuple[str, ...]
    """Names of files that do not change."""
    steps: tuple[int, ...]
    """Steps with a complete record."""


class RunPublisher:
    """Publishes the states of one run; only one process may publish at a URL."""

    def __init__(self, run: Path, url: str) -> None:
        self._run, self._store = run, ObjectStore(url)
        self._writer = secrets.token_hex(16)
        self._generation = 0
        self._taken_over: tuple[int, str] | None = None
        self._known: set[str] = set()
        self._kept: deque[set[str]] = deque()
        self._digests: dict[str, tuple[FileStamp, str]] = {}
        self._steps: dict[int, tuple[FileStamp, dict[str, tuple[str, ...]]]] = {}
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="klinic-publishing")
        self._pending: Future[str] | None = None
        self._last_start = float("-inf")

    @property
    def url(self) -> str:
        """Where the run is published."""
        return self._store.url

    def claim(self) -> None:
        """Take over the URL: publish the present state as this process, and wait for it."""
        newest = newest_snapshot(self._store)
        if newest is not None:
            self._generation, self._known = newest.generation, newest.objects()
            self._taken_over = newest.generation, newest.writer
            self._kept.append(set(self._known))
            for name in set(self._store.names(DATA)) - self._known:  # of a killed process
                self._store.remove(name)
        write_atomically(self._run / PUBLISHED, json_bytes({"writer": self._writer}) + b"\n")
        problem = self._publish_state(self._capture())
        if problem:
            raise MachineError(f"{self.url}: the run cannot be published there. {problem}")

    def is_due(self) -> bool:
        """Whether the last state was published long enough ago."""
        return time.monotonic() - self._last_start >= INTERVAL

    def start(self) -> str | None:
        """Start publishing the present state, unless a state is on its way.

        Returns the result for the state before, like `wait`.
        """
        if self._pending is not None and not self._pending.done():
            return None
        problem = self.wait()
        self._last_start = time.monotonic()
        self._pending = self._pool.submit(self._publish_state, self._capture())
        return problem

    def wait(self) -> str | None:
        """Wait for the state that is being published; return its problem, "" if it is there.

        None if no state was on its way.
        """
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def finish(self) -> None:
        """Publish the last state, and wait for it."""
        self.wait()
        problem = self._publish_state(self._capture())
        self._pool.shutdown()
        if problem:
            raise MachineError(
                f"{self.url}: the end of the run is not there. {problem} It is in {self._run}; "
                "`klinic train RECIPE --resume` publishes it."
            )

    def close(self) -> None:
        """Stop publishing."""
        self._pool.shutdown(wait=True)

    def _capture(self) -> CapturedState:
        """Return the present state. Checkpoints are listed first: all else is at least as new."""
        fixed = [*self._files_below("start")]
        checkpoints = self._run / CHECKPOINTS
        for folder in sorted(checkpoints.glob("step=*")):
            if folder.name.isascii() and folder.name[5:].isdigit():
                fixed += self._files_below(f"{CHECKPOINTS}/{folder.name}")
        names = [*SINGLE_FILES, *JOURNALS, *self._files_below("tensorboard")]
        contents = {
            name: read_bytes(self._run / name, largest=LARGEST_GROWING)
            for name in names
            if (self._run / name).is_file()
        }
        return CapturedState(
            contents=contents,
            fixed=tuple(fixed),
            steps=tuple(records.complete_steps(self._run)),
        )

    def _files_below(self, name: str) -> Iterator[str]:
        for folder, folders, files in os.walk(self._run / name):
            folders.sort()
            for path in (Path(folder, file) for file in sorted(files)):
                if not path.is_symlink():
                    yield path.relative_to(self._run).as_posix()

    def _publish_state(self, state: CapturedState) -> str:
        """Publish a state; return why that is not possible now, empty if it is done."""
        try:
            files = self._write_objects(state)
            self._refuse_other_writer()
            self._generation += 1
            snapshot = Snapshot(generation=self._generation, writer=self._writer, files=files)
            write_snapshot(self._store, snapshot)
            self._refuse_other_writer()
            self._remove_old(snapshot)
        except (UnreadableError, FileNotFoundError) as error:
            return str(error)
        return ""

    def _write_objects(self, state: CapturedState) -> dict[str, tuple[str, ...]]:
        """Write the content that is not there yet; return the digests of each file."""
        files: dict[str, tuple[str, ...]] = {}
        for name, data in state.contents.items():
            pieces = split_pieces(data) if is_growing(name) else [data]
            files[name] = tuple(self._write_piece(name, piece) for piece in pieces)
        for name in state.fixed:
            files[name] = (self._upload_file(name),)
        for step in state.steps:
            files |= self._upload_step(step)
        return files

    def _write_piece(self, name: str, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        if (target := object_name(name, digest)) not in self._known:
            self._store.write(target, data)
            self._known.add(target)
        return digest

    def _upload_file(self, name: str) -> str:
        path = self._run / name
        if not FILE_NAME.fullmatch(name):
            raise MachineError(f"{path}: has a name that cannot be published. Rename the file.")
        stamp = _stamp(path)
        cached = self._digests.get(name)
        digest = cached[1] if cached is not None and cached[0] == stamp else sha256_of(path)
        self._digests[name] = (stamp, digest)
        self._upload(name, digest)
        return digest

    def _upload(self, name: str, digest: str) -> None:
        if (target := object_name(name, digest)) not in self._known:
            self._store.upload(target, self._run / name)
            self._known.add(target)

    def _upload_step(self, step: int) -> dict[str, tuple[str, ...]]:
        """Upload the record of a step; return its files, none if the step was dropped meanwhile."""
        for _ in range(records.MAX_REREADS):
            try:
                return self._upload_parts(step)
            except FileNotFoundError:  # the parts were merged, or the step was dropped
                continue
        return {}

    def _upload_parts(self, step: int) -> dict[str, tuple[str, ...]]:
        folder = records.step_folder(self._run, step)
        path = folder / records.MANIFEST
        stamp = _stamp(path)
        cached = self._steps.get(step)
        if cached is not None and cached[0] == stamp:
            return cached[1]
        base = folder.relative_to(self._run).as_posix()
        try:
            data = read_bytes(path, largest=LARGEST_GROWING)
            listed = records.parse_parts(parse_object(data, path), path)
        except EvidenceError:  # damaged: another copy would be as well
            return {}
        files: dict[str, tuple[str, ...]] = {}
        for part in listed:
            name = f"{base}/{part.file}"
            if sha256_of(folder / part.file) != part.sha256:
                return {}
            self._upload(name, part.sha256)
            files[name] = (part.sha256,)
        name = f"{base}/{records.MANIFEST}"
        files[name] = (self._write_piece(name, data),)
        self._steps[step] = (stamp, files)
        return files

    def _refuse_other_writer(self) -> None:
        """Stop if another process published here since: it has continued the run."""
        newest = newest_snapshot(self._store)
        if newest is None and not self._generation:
            return
        if newest is not None and newest.writer == self._writer:
            self._generation = newest.generation  # also of a write that seemed to fail
            return
        if newest is not None and (newest.generation, newest.writer) == self._taken_over:
            return
        raise MachineError(
            f"{self.url}: another process continued this run there, so this one stops. Its own "
            f"steps since are in {self._run}."
        )

    def _remove_old(self, snapshot: Snapshot) -> None:
        """Remove manifests and content that only older states name."""
        self._kept.append(snapshot.objects())
        while len(self._kept) > NUM_KEPT:
            old = self._kept.popleft()
            needed: set[str] = set().union(*self._kept)
            for name in old - needed:
                self._store.remove(name)
                self._known.discard(name)
        for generation, name in manifest_names(self._store):
            if generation <= snapshot.generation - NUM_KEPT:
                self._store.remove(name)


def _stamp(path: Path) -> FileStamp:
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino
