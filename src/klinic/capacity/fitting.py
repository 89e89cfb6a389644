"""Find changes of a recipe with which its learner fits a GPU."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from klinic.capacity.forecast import Forecast, forecast_memory
from klinic.recipe.recipe import Recipe

MAX_SECONDS = 90.0  # for all forecasts of the search together
LORA_RANK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeChange:
    """One key of a recipe with another value."""

    key: str
    before: object
    after: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """Changes that were tried one after the other, each on top of those before it."""

    changes: tuple[RecipeChange, ...]
    forecast: Forecast | None
    """With all of the changes; None where nothing could be changed."""
    fits: bool
    has_more: bool
    """Whether time ran out before every change was tried."""


def find_fitting(
    recipe: Recipe, fits: Callable[[Forecast], bool], *, num_gpus: int, began: float
) -> Fitting:
    """Change a recipe until it fits, cheapest change first.

    `began` is when the dry run began: its own forecast counts towards the time limit.
    """
    changes: list[RecipeChange] = []
    forecast = None
    for change in _possible_changes(recipe):
        if time.monotonic() - began > MAX_SECONDS:
            return Fitting(changes=tuple(changes), forecast=forecast, fits=False, has_more=True)
        changes.append(change)
        recipe = apply_change(recipe, change)
        forecast = forecast_memory(recipe, num_gpus=num_gpus)
        if fits(forecast):
            return Fitting(changes=tuple(changes), forecast=forecast, fits=True, has_more=False)
    return Fitting(changes=tuple(changes), forecast=forecast, fits=False, has_more=False)


def _possible_changes(recipe: Recipe) -> Iterator[RecipeChange]:
    """Yield changes in the order of their cost: slower, less precise, fewer trained weights."""
    model, micro_batch = recipe.model, recipe.learner.micro_batch_size
    if not model.gradient_checkpointing:
        yield RecipeChange(key="model.gradient_checkpointing", before=False, after=True)
    if micro_batch > 1:
        yield RecipeChange(key="learner.micro_batch_size", before=micro_batch, after=1)
    if model.dtype != "bf16":
        yield RecipeChange(key="model.dtype", before=model.dtype, after="bf16")
    if model.lora_rank is None:
        yield RecipeChange(key="model.lora_rank", before=None, after=LORA_RANK)


def apply_change(recipe: Recipe, change: RecipeChange) -> Recipe:
    """Return the recipe with one key changed."""
    section_name, _, key = change.key.partition(".")
    section = getattr(recipe, section_name).model_copy(update={key: change.after})
    return recipe.model_copy(update={section_name: section})
