"""Recipes: the configuration of a run, validated, with the aliases of other trainers.

recipe.py     the `Recipe` model: all sections, and the checks across sections
section.py    base class of the sections: strict, frozen, bounds with a reason
kl.py         the `kl` section; `cluster`, `data`, `learner`, `loop`, `model`, `output`, `recovery`,
              `reference`, `sampler`, `sampling`, `warm_start` have a file each
held_out.py   the `eval` and `retention` sections
rewards.py    the `rewards` list
aliases.py    names of other trainers, and the keys that each sets
keys.py       dotted key names, and spelling suggestions
settings.py   one source (file, command line, call) to settings; merging of sources
loading.py    `load`, `from_keywords`, `dump`
yaml_text.py  the YAML subset of recipes
file.py       the text of a recipe file
problems.py   validation errors as one-line messages
secret.py     detects credentials in URLs
recorded.py   recipes from run folders, which are untrusted
function.py   imports `module:function` and `file.py:function`
given.py      `klinic.KL(...)` and `klinic.Recovery(...)`
"""

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
