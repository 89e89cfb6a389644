"""The files at the URL of a run, through fsspec: any of its file systems, with its own settings.

Only four operations are needed, which every object store has: write a new object, read one, list
names, remove. Nothing is appended, replaced or renamed.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from klinic.errors import ConfigError, EvidenceError, MissingExtraError, UnreadableError
from klinic.recipe.secret import refuse_secret

ResultT = TypeVar("ResultT")
WITH_FOLDERS = ("file", "local", "memory")  # protocols whose folders must exist before their files


class ObjectStore:
    """The objects below a URL, by their names with `/`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._system, self._root = _open_system(self.url)

    def write(self, name: str, data: bytes) -> None:
        """Write an object."""
        path = self._prepare(name)
        self._call(name, lambda: self._system.pipe_file(path, data))

    def upload(self, name: str, path: Path) -> None:
        """Write an object from a file, which is not held in memory."""
        target = self._prepare(name)
        self._call(name, lambda: self._system.put_file(str(path), target))

    def read(self, name: str, *, largest: int) -> bytes:
        """Return the bytes of an object; raise `EvidenceError` if it is larger than allowed."""
        path = f"{self._root}/{name}"
        data: bytes = self._call(
            name, lambda: self._system.cat_file(path, start=0, end=largest + 1)
        )
        if len(data) > largest:
            raise EvidenceError(f"{self.url}/{name}: is larger than {largest >> 20:,} MB.")
        return data

    def read_chunks(self, name: str, size: int) -> Iterator[bytes]:
        """Yield the bytes of an object in pieces."""
        file = self._call(name, lambda: self._system.open(f"{self._root}/{name}", "rb"))
        with file:
            while chunk := self._call(name, lambda: file.read(size)):
                yield chunk

    def names(self, prefix: str) -> list[str]:
        """Return the names of the objects below a prefix, as they are now."""
        path = f"{self._root}/{prefix}"

        def find() -> list[str]:
            self._system.invalidate_cache()
            return list(self._system.find(path))

        try:
            paths = self._call(prefix, find)
        except FileNotFoundError:
            return []
        return sorted(f"{prefix}/{text.partition(f'{path}/')[2]}" for text in paths)

    def remove(self, name: str) -> None:
        """Remove an object."""
        self._call(name, lambda: self._system.rm_file(f"{self._root}/{name}"))

    def _prepare(self, name: str) -> str:
        path = f"{self._root}/{name}"
        if self._protocols & set(WITH_FOLDERS):
            parent = path.rpartition("/")[0]
            self._call(name, lambda: self._system.makedirs(parent, exist_ok=True))
        return path

    @property
    def _protocols(self) -> set[str]:
        protocol = self._system.protocol
        return {protocol} if isinstance(protocol, str) else set(protocol)

    def _call(self, name: str, call: Callable[[], ResultT]) -> ResultT:
        """Return the result of a call; each library of fsspec has exceptions of its own."""
        try:
            return call()
        except FileNotFoundError:
            raise
        except Exception as error:
            raise UnreadableError(
                f"{self.url}/{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}. "
                "Check the URL, the network, and the credentials that fsspec's library reads."
            ) from error


def _open_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path there."""
    try:
        refuse_secret(url)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if "::" in url:
        raise ConfigError(f"{url} joins several file systems with `::`. Give the URL of one.")
    try:
        import fsspec
    except ImportError as error:
        raise MissingExtraError(
            f"{url} needs fsspec, which is not installed: pip install fsspec, and for an object "
            "store its package, such as s3fs."
        ) from error
    try:
        system, root = fsspec.url_to_fs(url)
    except ImportError as error:
        raise MissingExtraError(f"{url} needs another package: {error}") from error
    except Exception as error:
        raise ConfigError(f"{url} cannot be opened: {type(error).__name__}: {error}") from error
    if "://" not in url or not str(root).strip("/"):
        raise ConfigError(f"{url} has no folder for the run. Add one.")
    return system, str(root).rstrip("/")
