"""The folder of a run: where it is, whether it may be written, and whose it is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from klinic.errors import ConfigError
from klinic.recipe.loading import dump, load
from klinic.recipe.recipe import Recipe

RECIPE = "recipe.yaml"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
START = "start"
TENSORBOARD = "tensorboard"
RUNS = Path("runs")

# what may differ between a run and its continuation
MAY_CHANGE = (
    "output.",
    "loop.max_steps",
    "loop.eval_",
    "loop.checkpoint_",
    "loop.keep_",
    "loop.show_",
)


def open_folder(recipe: Recipe, name: str, *, resume: bool) -> Path:
    """Return the folder to write to, new, or with `resume` the one to go on in."""
    chosen = recipe.output.dir
    if resume:
        folder = Path(chosen) if chosen else _newest(name)
        if not (folder / RECIPE).is_file():
            raise ConfigError(
                f"there is no run in {folder} to resume. Leave --resume out to start one."
            )
        refuse_other(recipe, folder)
        return folder
    folder = Path(chosen) if chosen else next(f for f in _numbered(name) if not f.exists())
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"output.dir is {folder}, which is not empty. Go on with that run by --resume, or give "
            "another output.dir."
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_recipe(folder: Path, recipe: Recipe) -> None:
    """Keep the recipe as it was resolved."""
    (folder / RECIPE).write_text(dump(recipe), encoding="utf-8")


def refuse_other(recipe: Recipe, folder: Path) -> None:
    """Refuse to continue a run with another recipe than its own."""
    saved = load(folder / RECIPE).recipe
    now, then = dict(_flat(recipe.model_dump())), dict(_flat(saved.model_dump()))
    differing = [
        key
        for key in sorted(now.keys() | then.keys())
        if now.get(key) != then.get(key) and not key.startswith(MAY_CHANGE)
    ]
    if recipe.learner.schedule != "constant" and recipe.loop.max_steps != saved.loop.max_steps:
        differing.append("loop.max_steps")
    if differing:
        key = differing[0]
        raise ConfigError(
            f"{key} is {now.get(key)!r}, but the run in {folder} was started with "
            f"{then.get(key)!r}: it would no longer be the same run. Resume with its own value, "
            "or start a new run in another output.dir."
        )


def _flat(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, values


def _numbered(name: str) -> Iterator[Path]:
    yield RUNS / name
    number = 2
    while True:
        yield RUNS / f"{name}-{number}"
        number += 1


def _newest(name: str) -> Path:
    """Return the last of the folders that runs of this name were given."""
    last = RUNS / name
    for folder in _numbered(name):
        if not folder.exists():
            return last
        last = folder
    raise AssertionError  # _numbered does not end
