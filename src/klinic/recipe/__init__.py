"""Recipes: the configuration of a run, validated, with the aliases of other trainers.

recipe.py               the `Recipe` model: all sections, and the checks across sections
sections.py             the sections of a recipe: `kl`, `model`, `data`, `loop`, `learner`, ...
section.py              base class of the sections: strict, frozen, bounds with a reason
record_budget.py        `output.keep_records` as steps or bytes
rewards.py              the `rewards` list
aliases.py              names of other trainers, and the keys that each sets
trl_arguments.py        arguments of TRL's `GRPOConfig` as settings
trl_tables.py           those that have no effect here, and those that cannot be had
trl_schedule.py         batches, epochs and intervals as steps
keys.py                 dotted key names, and spelling suggestions
resolve.py              one source (file, command line, call) to settings; merging of sources
changed.py              settings that differ from their defaults
loading.py              loads and writes recipes
yaml_text.py            the YAML subset of recipes
file.py                 the text of a recipe file
validation_messages.py  validation errors as one-line messages
secret.py               detects credentials in URLs
recorded.py             recipes from run folders, which are untrusted
function.py             imports `module:function` and `file.py:function`
python_sections.py      `klinic.KL(...)` and `klinic.Recovery(...)`
"""

from klinic.recipe.loading import (
    LoadedRecipe,
    dump_recipe,
    flags_to_overrides,
    from_keywords,
    load_recipe,
)
from klinic.recipe.recipe import Recipe, check_complete

__all__ = [
    "LoadedRecipe",
    "Recipe",
    "check_complete",
    "dump_recipe",
    "flags_to_overrides",
    "from_keywords",
    "load_recipe",
]
