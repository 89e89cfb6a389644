"""Turns pydantic validation errors into one-line messages: key, value, expected value."""

import math
import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from klinic.recipe.keys import every_knob, sections
from klinic.recipe.rewards import RewardEntry
from klinic.recipe.secret import without_secrets

LONGEST_SHOWN = 60

WANTED = {
    "int_type": "it must be an integer",
    "float_type": "it must be a number",
    "finite_number": "it must be finite",
    "bool_type": "it must be true or false",
    "string_type": "it must be text. Put it in quotes if it is a name",
    "string_unicode": "it is not valid text",
    "tuple_type": "it must be a list",
    "model_type": "it must be a function, such as binary, or {function: binary, weight: 0.5}",
}


def shown(value: Any) -> str:
    """Format a value for a message: one line, truncated, without secrets or control characters.

    >>> shown(None), shown(True), shown([1, 2]), shown("a" * 70)[-4:]
    ('null', 'true', 'a list', 'a...')
    """
    if value is None or isinstance(value, bool):
        return str(value).lower() if value is not None else "null"
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list | tuple | set):
        return "a list"
    if isinstance(value, int) and abs(value) >= 10**LONGEST_SHOWN:
        return f"a number of more than {LONGEST_SHOWN} digits"
    if isinstance(value, str):
        value = without_secrets(value)
    text = repr(value) if isinstance(value, str | int | float) else type(value).__name__
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."


def shown_key(key: str) -> str:
    """Format a key for a message: as it is if printable, else quoted and truncated."""
    plain = key.isprintable() and key.isascii() and 0 < len(key) <= LONGEST_SHOWN and " " not in key
    return key if plain else shown(key)


def explain(error: ValidationError) -> Iterator[tuple[str, str]]:
    """Yield for each error its dotted key ("" for an error across keys) and a sentence."""
    for problem in error.errors(include_url=False):
        key, entry = _key(problem["loc"])
        if problem["type"] == "value_error" and (key not in every_knob() or key == ""):
            yield from (("", line) for line in str(problem["ctx"]["error"]).splitlines())
        else:
            yield key.partition(".")[0] if entry else key, _sentence(problem, key, entry)


def _sentence(problem: Any, key: str, entry: str) -> str:
    name, kind, value = entry or key, problem["type"], problem["input"]
    field = every_knob().get(key)
    if kind == "missing":
        about = field.description if field else _about(key)
        return f"{name} is missing: {about}"
    if kind == "extra_forbidden":
        known = ", ".join(f"`{name}`" for name in RewardEntry.model_fields)
        return f"{shown_key(name)} is not a key of a reward. It has {known}."
    if kind == "value_error":
        return f"{name} is {shown(value)}: {problem['ctx']['error']}{_default(field)}."
    if kind == "literal_error":
        return (
            f"{name} is {shown(value)}: use one of {', '.join(_choices(field))}{_default(field)}."
        )
    if kind == "float_type" and isinstance(value, int) and not isinstance(value, bool):
        kind = "finite_number"  # an integer above the largest float
    wanted = WANTED.get(kind, problem["msg"])
    return f"{name} is {shown(value)}: {wanted}{_default(field)}."


def _key(loc: tuple[int | str, ...]) -> tuple[str, str]:
    """Return the dotted key, and the indexed name (`rewards[0].weight`) if in a list, else ""."""
    key = ".".join(str(part) for part in loc if isinstance(part, str))
    key = key if key in every_knob() else re.sub(r"^\w+\.rewards\.", "rewards.", key)
    entry = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    inside = any(isinstance(part, int) for part in loc)
    return key, entry.removeprefix(".") if inside else ""


def _about(section: str) -> str:
    kind = sections()[section]
    needed = [f"{section}.{name}" for name, f in kind.model_fields.items() if f.is_required()]
    return {
        "model": "set the model to train, such as model: tiny.",
        "data": "set the source of prompts, such as data.task arithmetic, or data.path.",
    }.get(section, f"it needs {', '.join(needed)}.")


def _choices(field: FieldInfo | None) -> tuple[str, ...]:
    """Return the allowed words of a key, or of its entries if it is a list."""
    words = () if field is None else get_args(field.annotation)
    return tuple(word for entry in words for word in get_args(entry) or (entry,) if word != ...)


def _default(field: FieldInfo | None) -> str:
    if field is None or field.is_required() or field.default in (None, ()):
        return ""
    default = field.default
    if isinstance(default, tuple):
        return f" ([{', '.join(default)}] is the default)"
    if isinstance(default, float) and math.isfinite(default):
        return f" ({default:g} is the default)"
    return f" ({default if isinstance(default, str) else shown(default)} is the default)"
