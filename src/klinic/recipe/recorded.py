"""Loads recipes from run folders, which are untrusted: code they name runs only with consent.

Commands that read a run folder (`eval`, `export`, `diagnose --prove`, `ablate --plot`, `check`)
load its recipe here, without its functions, judges and model code unless the user passes
`--run-code`. A recipe that the user passes to `train` or `check` is loaded by
`klinic.recipe.loading`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klinic.recipe.loading import load_recipe
from klinic.recipe.recipe import Recipe
from klinic.recipe.rewards import RewardEntry

FLAG = "--run-code"
MODEL_CODE = "model.trust_remote_code"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCode:
    """A recipe setting that would run code, or send completions to a URL."""

    key: str
    """The recipe key that names it."""
    target: str

    def __str__(self) -> str:
        """Return the key, its target, and the absolute path if the target is in a file."""
        module_path = self.target.rpartition(":")[0]
        file = f" ({Path(module_path).absolute()})" if module_path.endswith(".py") else ""
        return f"{self.key}: {self.target}{file}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRecipe:
    """A recipe from a run folder, with the code it may run and the code removed from it."""

    recipe: Recipe
    allowed: tuple[NamedCode, ...] = ()
    refused: tuple[NamedCode, ...] = ()


def load_recorded(path: Path, *, run_code: bool) -> RecordedRecipe:
    """Load the recipe of a run folder; without `run_code`, remove all code from it."""
    recipe = load_recipe(path).recipe
    code = tuple(find_code(recipe))
    if run_code:
        return RecordedRecipe(recipe=recipe, allowed=code)
    return RecordedRecipe(recipe=_without_code(recipe) if code else recipe, refused=code)


def find_code(recipe: Recipe) -> Iterator[NamedCode]:
    """Yield every setting of a recipe that runs code from outside klinic."""
    if recipe.model.trust_remote_code:
        yield NamedCode(key=MODEL_CODE, target=f"Python files that come with {recipe.model.name}")
    if recipe.data.map is not None:
        yield NamedCode(key="data.map", target=recipe.data.map)
    if recipe.sampling.reply is not None:
        yield NamedCode(key="sampling.reply", target=recipe.sampling.reply)
    yield from _find_reward_code("rewards", recipe.rewards)
    if recipe.eval is not None:
        yield from _find_reward_code("eval.rewards", recipe.eval.rewards)
    if recipe.retention is not None:
        yield from _find_reward_code("retention.rewards", recipe.retention.rewards)


def without_model_code(code: Iterable[NamedCode]) -> tuple[NamedCode, ...]:
    """Return the functions and judges, without model code."""
    return tuple(one for one in code if one.key != MODEL_CODE)


def list_code(code: tuple[NamedCode, ...]) -> str:
    """Format code settings as a comma-separated list."""
    return ", ".join(map(str, code))


def _find_reward_code(key: str, entries: tuple[RewardEntry, ...]) -> Iterator[NamedCode]:
    """Yield the rewards that are functions of a file or module, or HTTP judges."""
    for entry in entries:
        if entry.is_url or ":" in entry.function:  # any other name is a reward of a built-in task
            yield NamedCode(key=key, target=entry.function)


def _without_code(recipe: Recipe) -> Recipe:
    """Return the recipe without functions, judges and model code.

    It removes all rewards if it removes one: a subset would be a different reward.
    """
    update: dict[str, Any] = {"model": recipe.model.model_copy(update={"trust_remote_code": False})}
    if not without_model_code(find_code(recipe)):
        return recipe.model_copy(update=update)
    code_removed: dict[str, Any] = {
        "data": recipe.data.model_copy(update={"map": None}),
        "sampling": recipe.sampling.model_copy(update={"reply": None}),
        "rewards": (),
        "eval": None,
        "retention": None,
    }
    return recipe.model_copy(update=update | code_removed)
