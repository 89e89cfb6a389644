"""Brings a published run into a local folder, every byte compared with the digests it has there."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from klinic.errors import ConfigError, EvidenceError
from klinic.evidence.files import open_file
from klinic.evidence.remote.object_store import ObjectStore
from klinic.evidence.remote.snapshot import (
    PIECE_BYTES,
    Snapshot,
    is_growing,
    newest_snapshot,
    object_name,
)
from klinic.evidence.writing import remove_tree, write_chunks
from klinic.runtime.regular_file import BUFFER_BYTES

MAX_ATTEMPTS = 3  # the state that is read may be removed meanwhile, as an old one
NOT_FOR_READERS = ("checkpoints/", "start/", "tensorboard/")


def is_evidence(name: str) -> bool:
    """Whether a diagnosis or a report reads a file of a run."""
    return not name.startswith(NOT_FOR_READERS)


def find_snapshot(store: ObjectStore) -> Snapshot:
    """Return the newest state at a URL; raise `ConfigError` if there is none."""
    snapshot = newest_snapshot(store)
    if snapshot is None:
        raise ConfigError(
            f"there is no run at {store.url}. Check the URL, and the credentials for it; "
            "`klinic train` publishes a run where output.dir says."
        )
    return snapshot


def fetch_run(
    store: ObjectStore, folder: Path, *, wanted: Callable[[str], bool] = lambda _: True
) -> Snapshot:
    """Make a folder hold the newest state at a URL, or its wanted files; nothing else stays."""
    for attempt in range(MAX_ATTEMPTS):
        snapshot = find_snapshot(store)
        try:
            _fetch_files(store, snapshot, folder, wanted)
        except FileNotFoundError as error:
            if attempt == MAX_ATTEMPTS - 1:
                raise EvidenceError(
                    f"{store.url}: a file of the run is missing ({error})."
                ) from error
            continue
        break
    return snapshot


def _fetch_files(
    store: ObjectStore, snapshot: Snapshot, folder: Path, wanted: Callable[[str], bool]
) -> None:
    names = sorted(filter(wanted, snapshot.files), key=_reading_order)
    for name in names:
        path, digests = folder / name, snapshot.files[name]
        if not _is_current(path, name, digests):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_chunks(path, _read_pieces(store, name, digests))
    kept = {folder / name for name in names}
    for path in [path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()]:
        if path not in kept:
            remove_tree(path)


def _reading_order(name: str) -> tuple[bool, str]:
    """Order manifests of steps and checkpoints behind the files that they name."""
    return name.endswith(("/complete.json", "/manifest.json")), name


def _is_current(path: Path, name: str, digests: Sequence[str]) -> bool:
    """Whether a local file has the published content."""
    if path.is_symlink() or not path.is_file():
        return False
    size = PIECE_BYTES if is_growing(name) else None
    with open_file(path) as file:
        return list(_digests_of(file.read, size)) == list(digests)


def _digests_of(read: Callable[[int], bytes | None], size: int | None) -> Iterator[str]:
    """Yield the digests of pieces of a size, or that of the whole content."""
    if size is not None:
        while piece := read(size):
            yield hashlib.sha256(piece).hexdigest()
        return
    digest = hashlib.sha256()
    while chunk := read(BUFFER_BYTES):
        digest.update(chunk)
    yield digest.hexdigest()


def _read_pieces(store: ObjectStore, name: str, digests: Sequence[str]) -> Iterator[bytes]:
    """Yield the content of a file; raise `EvidenceError` where it differs from its digest."""
    for expected in digests:
        digest = hashlib.sha256()
        for chunk in store.read_chunks(object_name(name, expected), BUFFER_BYTES):
            digest.update(chunk)
            yield chunk
        if digest.hexdigest() != expected:
            raise EvidenceError(
                f"{store.url}/{object_name(name, expected)}: is not what its name says: the "
                "SHA-256 differs. It was damaged; restore it from a copy."
            )
