"""Reads the text of a recipe file; suggests nearby recipes if the file is missing."""

from difflib import get_close_matches
from pathlib import Path

from klinic.errors import ConfigError
from klinic.runtime.regular_file import open_regular

MAX_FILE_BYTES = 1_000_000  # bytes; typical recipes have a few hundred
SUFFIXES = frozenset({".yaml", ".yml"})
MAX_LISTED = 5


def read_text(path: Path) -> str:
    """Return the text of a recipe file."""
    try:
        if not path.is_file():
            raise ConfigError(f"{path}: {_missing_file_message(path)}")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(
                f"{path}: the file has {path.stat().st_size:,} bytes; a recipe has at most "
                f"{MAX_FILE_BYTES:,}. If it is a dataset, set it as data.path."
            )
        with open_regular(path) as file:
            return (file.read(MAX_FILE_BYTES + 1) or b"").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: byte {error.start} is not UTF-8. Save the recipe as UTF-8 text."
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: the file cannot be read: {error.strerror}.") from error


def _missing_file_message(path: Path) -> str:
    kind = "this is a folder" if path.is_dir() else "there is no such file"
    nearby = _recipes_near(path)
    names = {str(recipe): recipe.stem for recipe in nearby}
    close = get_close_matches(path.stem, names.values(), n=1)
    if close:
        return f"{kind}. Did you mean {next(n for n, stem in names.items() if stem == close[0])}?"
    if names:
        remainder = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
        return f"{kind}. Recipes nearby: {', '.join(list(names)[:MAX_LISTED])}{remainder}."
    return f"{kind}, and there are no recipes nearby. Give its path relative to {Path.cwd()}."


def _recipes_near(path: Path) -> list[Path]:
    folders = [path, path.parent, Path("recipes"), Path()]
    candidates = (
        file
        for folder in folders
        if folder.is_dir()
        for file in sorted(folder.iterdir())
        if file.suffix in SUFFIXES
    )
    return list(dict.fromkeys(candidates))
