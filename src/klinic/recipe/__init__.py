"""What a run is asked to do: the sections of a recipe, its aliases and its loading."""

from klinic.recipe.loading import Loaded, dump, flags_to_overrides, from_keywords, load
from klinic.recipe.recipe import Recipe, check_complete

__all__ = [
    "Loaded",
    "Recipe",
    "check_complete",
    "dump",
    "flags_to_overrides",
    "from_keywords",
    "load",
]
