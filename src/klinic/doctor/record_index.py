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

RACY = 2_000_000_000  # nanoseconds: a younger file may change without a new time stamp


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
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


UNREADABLE = Seen(names=(), stamp=None, digest="", starts=False, verified=False)


class RecordIndex:
    """The cached digests of a run's records, per segment."""

    def __init__(self, run: Path, cache: FindingsCache | None) -> None:
        self._run, self._cache = run, cache
        self._place = str(run.resolve())

    def look(self, number: int, steps: Sequence[int]) -> dict[int, Seen]:
        """Return the files of a segment's steps; reads only new or changed manifests."""
        value = None if self._cache is None else self._cache.get(self._key(number))
        kept = value if isinstance(value, dict) else {}
        return {step: self._known(step, kept.get(str(step))) or self._read(step) for step in steps}

    def keep(self, number: int, seen: Mapping[int, Seen]) -> None:
        """Cache the steps of a segment whose records are verified."""
        if self._cache is not None:
            usable = {step: one for step, one in seen.items() if one.stamp is not None}
            entries = {s: [o.names, o.stamp, o.digest, o.starts] for s, o in usable.items()}
            self._cache.put(self._key(number), entries)

    def verify(self, seen: Mapping[int, Seen]) -> bool:
        """Verify the files that are not yet verified; return whether all are intact."""
        unsure = {step: one for step, one in seen.items() if not one.verified}
        try:
            for step in unsure:
                store.verify_parts(self._run, step, store.read_step_files(self._run, step).parts)
        except (EvidenceError, OSError):
            return False
        return self.unchanged(unsure)

    def unchanged(self, seen: Mapping[int, Seen]) -> bool:
        """Whether the files of all steps are unchanged."""
        again = (self._read(s) if o.stamp is None else o for s, o in seen.items())
        return all(
            now.digest == one.digest
            and (one.stamp is None or _stamp(self._folder(step), one.names) == one.stamp)
            for (step, one), now in zip(seen.items(), again, strict=True)
        )

    def _known(self, step: int, entry: Any) -> Seen | None:
        try:
            names, stamp, digest, starts = entry
        except (TypeError, ValueError):
            return None
        if _stamp(self._folder(step), names) != stamp:
            return None
        return Seen(
            names=tuple(names), stamp=stamp, digest=str(digest), starts=bool(starts), verified=True
        )

    def _read(self, step: int) -> Seen:
        folder = self._folder(step)
        first = _stamp(folder, (store.MANIFEST,))
        try:
            files = store.read_step_files(self._run, step)
        except (EvidenceError, OSError):
            return UNREADABLE  # judging the step raises the error
        names = (store.MANIFEST, *(part.file for part in files.parts))
        same = first is not None and first == _stamp(folder, (store.MANIFEST,))
        return Seen(
            names=names,
            stamp=_stamp(folder, names) if same else None,
            digest=files.digest,
            starts=files.facts.get("learner_version") == 0,
            verified=False,
        )

    def _folder(self, step: int) -> str:
        return str(store.step_folder(self._run, step))

    def _key(self, number: int) -> str:
        place = os.fsencode(self._place)
        return hashlib.sha256(b"records 1\n%d\n%s" % (number, place)).hexdigest()


def _stamp(folder: str, names: Sequence[str]) -> str | None:
    """Return a digest of the stat data of files; None if one is missing or too young."""
    now = time.time_ns()
    digest = hashlib.blake2b(digest_size=16)
    for name in names:
        try:
            about = os.stat(f"{folder}/{name}")  # noqa: PTH116 - a path object takes thrice as long
        except OSError:
            return None
        changed = about.st_mtime_ns, about.st_ctime_ns
        if now - max(changed) < RACY:
            return None
        digest.update(repr((*changed, about.st_size, about.st_ino, about.st_dev)).encode())
    return digest.hexdigest()
