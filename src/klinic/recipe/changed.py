"""The settings of a recipe that differ from their defaults."""

from typing import Any

from klinic.recipe.keys import recipe_sections
from klinic.recipe.recipe import Recipe
from klinic.recipe.section import Section


def changed_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that differ from their defaults, by key and section.

    A section that is off by default is included once it is on, even with no other change.

    >>> from klinic.recipe.loading import from_keywords
    >>> recipe = from_keywords(model="tiny", task="arithmetic", kl_beta=0.02, recovery=None).recipe
    >>> changed_settings(recipe)["kl"], changed_settings(recipe)["recovery"]
    ({'coef': 0.02}, None)
    """
    values = recipe.model_dump(mode="json")
    changed: dict[str, Any] = {}
    for name, field in Recipe.model_fields.items():
        value, section = getattr(recipe, name), recipe_sections().get(name)
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if section is None or value is None:
            if value != default:
                changed[name] = values[name]
        elif (keys := _changed_keys(value, section)) or default is None:
            changed[name] = {key: values[name][key] for key in keys}
    return changed


def _changed_keys(section: Section, kind: type[Section]) -> list[str]:
    return [
        key
        for key, field in kind.model_fields.items()
        if field.is_required()
        or getattr(section, key) != field.get_default(call_default_factory=True)
    ]
