"""URLs of runs, such as `s3://bucket/run`. They come from a recipe or a command line only."""

import hashlib
import re
from pathlib import Path

WORKING_FOLDERS = Path("runs")
COLLAPSED = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.DOTALL)
NAME_LENGTH = 40  # characters of a URL's last part in the name of a folder


def is_url(text: str) -> bool:
    """Whether a run folder is given as a URL.

    >>> [is_url(text) for text in ("s3://bucket/run", "runs/first", "file:///shared/run")]
    [True, False, True]
    """
    return "://" in text


def local_folder(chosen: str) -> Path:
    """Return the local folder of a run: the given one, or where a run at a URL works.

    >>> local_folder("runs/first").as_posix(), local_folder("s3://bucket/first").as_posix()
    ('runs/first', 'runs/first-bdc40a01')
    """
    if not is_url(chosen):
        return Path(chosen).expanduser()
    last = re.sub(r"[^A-Za-z0-9._-]+", "-", chosen.rstrip("/").rpartition("/")[2]).strip(".-")
    digest = hashlib.sha256(chosen.rstrip("/").encode()).hexdigest()
    return WORKING_FOLDERS / f"{last[:NAME_LENGTH] or 'run'}-{digest[:8]}"


def url_of_path(path: Path) -> str | None:
    """Return the URL that was parsed as a path; None if it is a path.

    >>> url_of_path(Path("s3://bucket/run")), url_of_path(Path("file:///shared/run"))
    ('s3://bucket/run', 'file:///shared/run')
    """
    match = COLLAPSED.fullmatch(str(path))
    if match is None or path.exists():
        return None
    scheme, rest = match.groups()
    return f"{scheme}:///{rest}" if scheme in ("file", "local") else f"{scheme}://{rest}"
