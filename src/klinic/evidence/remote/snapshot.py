"""A published state of a run: one manifest that names the content of every file.

    manifests/00000017-SHA256.json           a manifest; its name holds the digest of its bytes
    data/records/.../part-00000.parquet/SHA  the content of a file, or a piece of a journal

The newest manifest whose digest fits is the state. A torn one is passed over, and nothing is read
that it does not name.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from klinic.errors import EvidenceError
from klinic.evidence.files import parse_json
from klinic.evidence.remote.object_store import ObjectStore

SNAPSHOT_SCHEMA = 1
MANIFESTS, DATA = "manifests", "data"
PIECE_BYTES = 1 << 20
LARGEST_MANIFEST = 1 << 28  # bytes; two million files
MANIFEST_NAME = re.compile(rf"{MANIFESTS}/([0-9]{{8,12}})-([0-9a-f]{{64}})\.json")
DIGEST = re.compile(r"[0-9a-f]{64}")
NAME = r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,199}"
SINGLE_FILES = (
    *("recipe.yaml", "run.json", "tokens.json", "warm_start.json", "recovery.json"),
    *("diagnosis.json", "wandb.json"),
)
JOURNALS = ("metrics.jsonl", "events.jsonl", "probes.jsonl")
TREES = ("records", "checkpoints", "start", "tensorboard")
SINGLE_NAME = "|".join(map(re.escape, (*SINGLE_FILES, *JOURNALS)))
FILE_NAME = re.compile(rf"(?:{SINGLE_NAME}|(?:{'|'.join(TREES)})(?:/{NAME}){{1,8}})")
"""The files that a manifest may name; others are neither published nor fetched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The files of a published state."""

    generation: int
    writer: str
    """Random text of the process that published it."""
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Digests of the content of each file, of its pieces in order."""

    def objects(self) -> set[str]:
        """Return the names of all objects."""
        return {object_name(name, one) for name, digests in self.files.items() for one in digests}


def is_growing(name: str) -> bool:
    """Whether a file of a run is appended to, so that it is published in pieces."""
    return name in JOURNALS or name.startswith("tensorboard/")


def split_pieces(data: bytes) -> list[bytes]:
    """Return the pieces of a growing file: whole ones never change while it grows.

    >>> [len(piece) for piece in split_pieces(bytes(PIECE_BYTES + 3))] == [PIECE_BYTES, 3]
    True
    """
    return [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]


def object_name(name: str, digest: str) -> str:
    """Return the name of the object with the content of a file."""
    return f"{DATA}/{name}/{digest}"


def write_snapshot(store: ObjectStore, snapshot: Snapshot) -> str:
    """Write the manifest of a state whose objects are all there; return its name."""
    content = {
        "schema": SNAPSHOT_SCHEMA,
        "generation": snapshot.generation,
        "writer": snapshot.writer,
        "files": {name: list(digests) for name, digests in sorted(snapshot.files.items())},
    }
    data = json.dumps(content, separators=(",", ":")).encode()
    name = f"{MANIFESTS}/{snapshot.generation:08d}-{hashlib.sha256(data).hexdigest()}.json"
    store.write(name, data)
    return name


def manifest_names(store: ObjectStore) -> list[tuple[int, str]]:
    """Return generation and name of all manifests, the newest first."""
    matches = [MANIFEST_NAME.fullmatch(name) for name in store.names(MANIFESTS)]
    return sorted(((int(m[1]), m[0]) for m in matches if m is not None), reverse=True)


def newest_snapshot(store: ObjectStore) -> Snapshot | None:
    """Return the newest state at a URL; None if there is none."""
    for _, name in manifest_names(store):
        try:
            data = store.read(name, largest=LARGEST_MANIFEST)
        except FileNotFoundError:  # removed meanwhile, as an old one
            continue
        if name.endswith(f"-{hashlib.sha256(data).hexdigest()}.json"):
            return _parse_snapshot(data, f"{store.url}/{name}")
    return None


def _parse_snapshot(data: bytes, source: str) -> Snapshot:
    """Return the state of a manifest, every name of which is one of a run."""
    try:
        content = parse_json(data, most_containers=LARGEST_MANIFEST)
        schema, files = content["schema"], content["files"]
        snapshot = Snapshot(
            generation=int(content["generation"]),
            writer=str(content["writer"]),
            files={name: tuple(digests) for name, digests in files.items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EvidenceError(f"{source}: is not the manifest of a run ({error}).") from error
    if schema != SNAPSHOT_SCHEMA:
        raise EvidenceError(
            f"{source}: has schema {schema}, but this klinic reads {SNAPSHOT_SCHEMA}. Update "
            "klinic."
        )
    for name, digests in snapshot.files.items():
        if not FILE_NAME.fullmatch(name) or not all(map(_is_digest, digests)):
            raise EvidenceError(f"{source}: names {name!r}, which is no file of a run.")
    return snapshot


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and DIGEST.fullmatch(value) is not None
