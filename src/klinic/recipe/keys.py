"""Recipe keys by dotted name, and suggestions for misspelt names."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args

from pydantic.fields import FieldInfo

from klinic.recipe.recipe import Recipe
from klinic.recipe.rewards import RewardEntry
from klinic.recipe.section import Section

MAX_TYPO_EDITS = 2  # edits up to which a name counts as a typo
MAX_SUGGESTIONS = 3
FAR = 1000  # edits; more than between any two keys
MAX_NAME_LENGTH = 60  # no key is half as long


@cache
def recipe_sections() -> dict[str, type[Section]]:
    """Return every section by name."""
    fields = Recipe.model_fields.items()
    return {name: kind for name, field in fields if (kind := _section_type(field)) is not None}


@cache
def optional_sections() -> frozenset[str]:
    """Return the sections that may be null, which disables them."""
    return frozenset(name for name in recipe_sections() if _may_be_none(Recipe.model_fields[name]))


@cache
def recipe_fields() -> dict[str, FieldInfo]:
    """Return every key that takes a value, by dotted name, in recipe order.

    >>> list(recipe_fields())[:4]
    ['seed', 'threads', 'model.name', 'model.device']
    """
    return dict(_iter_fields())


@cache
def all_fields() -> dict[str, FieldInfo]:
    """Return all keys, including those of a `rewards` entry."""
    knobs = {}
    for key, field in recipe_fields().items():
        knobs[key] = field
        if key == "rewards":
            knobs |= {f"rewards.{name}": inner for name, inner in RewardEntry.model_fields.items()}
    return knobs


def _iter_fields() -> Iterator[tuple[str, FieldInfo]]:
    for name, field in Recipe.model_fields.items():
        section = _section_type(field)
        if section is None:
            yield name, field
        else:
            yield from ((f"{name}.{key}", inner) for key, inner in section.model_fields.items())


def _section_type(field: FieldInfo) -> type[Section] | None:
    choices = get_args(field.annotation) if _may_be_none(field) else ()
    for kind in (field.annotation, *choices):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def _may_be_none(field: FieldInfo) -> bool:
    kind: Any = field.annotation
    return isinstance(kind, UnionType) and NoneType in get_args(kind)


def is_flag(key: str) -> bool:
    """Return whether a key takes a boolean."""
    field = recipe_fields().get(key)
    return field is not None and field.annotation is bool


def flatten_settings(values: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted names.

    >>> flatten_settings({"kl": {"coef": 0.1}, "seed": 0})
    {'kl.coef': 0.1, 'seed': 0}
    """
    if not isinstance(values, Mapping):
        return {prefix: values}
    parts = [
        flatten_settings(value, f"{prefix}.{key}" if prefix else str(key))
        for key, value in values.items()
    ]
    return {key: value for part in parts for key, value in part.items()}


def suggest_names(name: str, alias_names: Mapping[str, Any]) -> list[str]:
    """Return the keys and aliases that are closest to a misspelt name, the closest first.

    >>> suggest_names("learner.learnin_rate", {})
    ['learner.learning_rate']
    >>> suggest_names("kl.group_size", {})
    ['loop.group_size']
    """
    if len(name) > MAX_NAME_LENGTH:
        return []
    leaf = name.rpartition(".")[2]
    distance = {
        key: _bounded_distance(name, key, MAX_TYPO_EDITS)
        for key in (*recipe_sections(), *recipe_fields())
    }
    for key in recipe_fields():  # the right name in the wrong section counts as one edit
        distance[key] = min(
            distance[key], _bounded_distance(leaf, key.rpartition(".")[2], len(leaf) // 3) + 1
        )
    for alias in alias_names:
        distance[alias] = _bounded_distance(leaf, alias, len(leaf) // 3) + (leaf != name)
    least = min(distance.values())
    if least <= min(MAX_TYPO_EDITS + 1, len(name) // 2):
        return [key for key, d in distance.items() if d == least][:MAX_SUGGESTIONS]
    return get_close_matches(name, distance, n=1) or get_close_matches(leaf, distance, n=1)


def _bounded_distance(name: str, right: str, limit: int) -> int:
    """Return the edit distance, or `FAR` above the limit."""
    if abs(len(name) - len(right)) > limit:
        return FAR
    distance = edit_distance(name, right)
    return distance if distance <= limit else FAR


def edit_distance(a: str, b: str) -> int:
    """Return the edit distance: insertions, deletions, substitutions and adjacent swaps.

    >>> edit_distance("coef", "coeff"), edit_distance("coef", "ceof"), edit_distance("kl", "")
    (1, 1, 2)
    """
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, char in enumerate(a):
        oldest, before, row = before, row, [i + 1]
        for j, other in enumerate(b):
            cost = min(row[j] + 1, before[j + 1] + 1, before[j] + (char != other))
            if i and j and char == b[j - 1] and a[i - 1] == other:
                cost = min(cost, oldest[j - 1] + 1)
            row.append(cost)
    return row[-1]
