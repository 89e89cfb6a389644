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

SURE = 2  # edits up to which a name counts as a typo
MOST_SUGGESTIONS = 3
FAR = 1000  # edits; more than between any two keys
LONGEST_NAME = 60  # no key is half as long


@cache
def sections() -> dict[str, type[Section]]:
    """Return every section by name."""
    fields = Recipe.model_fields.items()
    return {name: kind for name, field in fields if (kind := _section(field)) is not None}


@cache
def optional_sections() -> frozenset[str]:
    """Return the sections that may be null, which disables them."""
    return frozenset(name for name in sections() if _may_be_none(Recipe.model_fields[name]))


@cache
def fields() -> dict[str, FieldInfo]:
    """Return every key that takes a value, by dotted name, in recipe order.

    >>> list(fields())[:4]
    ['seed', 'threads', 'model.name', 'model.dtype']
    """
    return dict(_walk())


@cache
def every_knob() -> dict[str, FieldInfo]:
    """Return all keys, including those of a `rewards` entry."""
    knobs = {}
    for key, field in fields().items():
        knobs[key] = field
        if key == "rewards":
            knobs |= {f"rewards.{name}": inner for name, inner in RewardEntry.model_fields.items()}
    return knobs


def _walk() -> Iterator[tuple[str, FieldInfo]]:
    for name, field in Recipe.model_fields.items():
        section = _section(field)
        if section is None:
            yield name, field
        else:
            yield from ((f"{name}.{key}", inner) for key, inner in section.model_fields.items())


def _section(field: FieldInfo) -> type[Section] | None:
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
    field = fields().get(key)
    return field is not None and field.annotation is bool


def dotted(values: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted names.

    >>> dotted({"kl": {"coef": 0.1}, "seed": 0})
    {'kl.coef': 0.1, 'seed': 0}
    """
    if not isinstance(values, Mapping):
        return {prefix: values}
    parts = [
        dotted(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in values.items()
    ]
    return {key: value for part in parts for key, value in part.items()}


def nearest(name: str, familiar: Mapping[str, Any]) -> list[str]:
    """Return the keys and aliases that are closest to a misspelt name, the closest first.

    >>> nearest("learner.learnin_rate", {})
    ['learner.learning_rate']
    >>> nearest("kl.group_size", {})
    ['loop.group_size']
    """
    if len(name) > LONGEST_NAME:
        return []
    leaf = name.rpartition(".")[2]
    distance = {key: _slips(name, key, SURE) for key in (*sections(), *fields())}
    for key in fields():  # the right name in the wrong section counts as one edit
        distance[key] = min(distance[key], _slips(leaf, key.rpartition(".")[2], len(leaf) // 3) + 1)
    for alias in familiar:
        distance[alias] = _slips(leaf, alias, len(leaf) // 3) + (leaf != name)
    least = min(distance.values())
    if least <= min(SURE + 1, len(name) // 2):
        return [key for key, d in distance.items() if d == least][:MOST_SUGGESTIONS]
    return get_close_matches(name, distance, n=1) or get_close_matches(leaf, distance, n=1)


def _slips(name: str, right: str, most: int) -> int:
    """Return the edit distance, or `FAR` above the limit."""
    if abs(len(name) - len(right)) > most:
        return FAR
    distance = edits(name, right)
    return distance if distance <= most else FAR


def edits(a: str, b: str) -> int:
    """Return the edit distance: insertions, deletions, substitutions and adjacent swaps.

    >>> edits("coef", "coeff"), edits("coef", "ceof"), edits("kl", "")
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
