"""Digests of a run's records, without re-reading unchanged files.

The manifest of a step holds the digests of its files, so its own digest covers all of them once
they are verified. Like git's index, the user's cache stores time stamps, sizes and inodes of the
files with the digest: a file with the same stamp is not opened.
"""

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klinic.doctor.findings_cache import FindingsCache
from klinic.errors import EvidenceError
from klinic.evidence import store

RACY_NS = 2_000_000_000  # nanoseconds: a younger file may change without a new time stamp


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFileState:
    """The files of a step: names, stat digest and content digest."""

    names: tuple[str, ...]
    """File names, the manifest first; empty if it cannot be read."""
    stamp: str | None
    """Stat digest of the files; None if they may change without a new time stamp."""
    digest: str
    starts: bool
    """Whether the step is the first: no update precedes it."""
    verified: bool
    """Whether the files match the digests of the manifest."""


UNREADABLE = StepFileState(names=(), stamp=None, digest="", starts=False, verified=False)


class RecordIndex:
    """The cached digests of a run's records, per segment."""

    def __init__(self, run: Path, cache: FindingsCache | None) -> None:
        self._run, self._cache = run, cache
        self._run_path = str(run.resolve())

    def inspect_steps(self, number: int, steps: Sequence[int]) -> dict[int, StepFileState]:
        """Return the files of a segment's steps; reads only new or changed manifests."""
        value = None if self._cache is None else self._cache.get(self._cache_key(number))
        cached = value if isinstance(value, dict) else {}
        return {
            step: self._from_cache(step, cached.get(str(step))) or self._read_state(step)
            for step in steps
        }

    def cache_steps(self, number: int, states: Mapping[int, StepFileState]) -> None:
        """Cache the steps of a segment whose records are verified."""
        if self._cache is not None:
            usable = {step: one for step, one in states.items() if one.stamp is not None}
            entries = {s: [o.names, o.stamp, o.digest, o.starts] for s, o in usable.items()}
            self._cache.put(self._cache_key(number), entries)

    def verify(self, states: Mapping[int, StepFileState]) -> bool:
        """Verify the files that are not yet verified; return whether all are intact."""
        unsure = {step: one for step, one in states.items() if not one.verified}
        try:
            for step in unsure:
                store.verify_parts(self._run, step)
        except (EvidenceError, OSError):
            return False
        return self.is_unchanged(unsure)

    def is_unchanged(self, states: Mapping[int, StepFileState]) -> bool:
        """Whether the files of all steps are unchanged."""
        again = (self._read_state(s) if o.stamp is None else o for s, o in states.items())
        return all(
            now.digest == one.digest
            and (one.stamp is None or _stat_digest(self._step_folder(step), one.names) == one.stamp)
            for (step, one), now in zip(states.items(), again, strict=True)
        )

    def _from_cache(self, step: int, entry: Any) -> StepFileState | None:
        try:
            names, stamp, digest, starts = entry
        except (TypeError, ValueError):
            return None
        if _stat_digest(self._step_folder(step), names) != stamp:
            return None
        return StepFileState(
            names=tuple(names), stamp=stamp, digest=str(digest), starts=bool(starts), verified=True
        )

    def _read_state(self, step: int) -> StepFileState:
        folder = self._step_folder(step)
        first = _stat_digest(folder, (store.MANIFEST,))
        try:
            files = store.read_step_files(self._run, step)
        except (EvidenceError, OSError):
            return UNREADABLE  # judging the step raises the error
        names = (store.MANIFEST, *(part.file for part in files.parts))
        same = first is not None and first == _stat_digest(folder, (store.MANIFEST,))
        return StepFileState(
            names=names,
            stamp=_stat_digest(folder, names) if same else None,
            digest=files.digest,
            starts=files.facts.get("learner_version") == 0,
            verified=False,
        )

    def _step_folder(self, step: int) -> str:
        return str(store.step_folder(self._run, step))

    def _cache_key(self, number: int) -> str:
        encoded_path = os.fsencode(self._run_path)
        return hashlib.sha256(b"records 1\n%d\n%s" % (number, encoded_path)).hexdigest()


def _stat_digest(folder: str, names: Sequence[str]) -> str | None:
    """Return a digest of the stat data of files; None if one is missing or too young."""
    now = time.time_ns()
    digest = hashlib.blake2b(digest_size=16)
    for name in names:
        try:
            status = os.stat(f"{folder}/{name}")  # noqa: PTH116 - a path object takes thrice as long
        except OSError:
            return None
        changed = status.st_mtime_ns, status.st_ctime_ns
        if now - max(changed) < RACY_NS:
            return None
        digest.update(repr((*changed, status.st_size, status.st_ino, status.st_dev)).encode())
    return digest.hexdigest()
