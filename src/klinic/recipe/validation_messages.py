"""Turns pydantic validation errors into one-line messages: key, value, expected value."""

import math
import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from klinic.recipe.keys import all_fields, recipe_sections
from klinic.recipe.rewards import RewardEntry
from klinic.recipe.secret import mask_secrets

MAX_SHOWN_LENGTH = 60

EXPECTED = {
    "int_type": "it must be an integer",
    "float_type": "it must be a number",
    "finite_number": "it must be finite",
    "bool_type": "it must be true or false",
    "string_type": "it must be text. Put it in quotes if it is a name",
    "string_unicode": "it is not valid text",
    "tuple_type": "it must be a list",
    "model_type": "it must be a function, such as binary, or {function: binary, weight: 0.5}",
}


def format_value(value: Any) -> str:
    """Format a value for a message: one line, truncated, without secrets or control characters.

    >>> format_value(None), format_value(True), format_value([1, 2]), format_value("a" * 70)[-4:]
    ('null', 'true', 'a list', 'a...')
    """
    if value is None or isinstance(value, bool):
        return str(value).lower() if value is not None else "null"
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list | tuple | set):
        return "a list"
    if isinstance(value, int) and abs(value) >= 10**MAX_SHOWN_LENGTH:
        return f"a number of more than {MAX_SHOWN_LENGTH} digits"
    if isinstance(value, str):
        value = mask_secrets(value)
    text = repr(value) if isinstance(value, str | int | float) else type(value).__name__
    return text if len(text) <= MAX_SHOWN_LENGTH else text[: MAX_SHOWN_LENGTH - 3] + "..."


def format_key(key: str) -> str:
    """Format a key for a message: as it is if printable, else quoted and truncated."""
    plain = (
        key.isprintable() and key.isascii() and 0 < len(key) <= MAX_SHOWN_LENGTH and " " not in key
    )
    return key if plain else format_value(key)


def explain_errors(error: ValidationError) -> Iterator[tuple[str, str]]:
    """Yield for each error its dotted key ("" for an error across keys) and a sentence."""
    for problem in error.errors(include_url=False):
        key, entry = _dotted_key(problem["loc"])
        if problem["type"] == "value_error" and (key not in all_fields() or key == ""):
            yield from (("", line) for line in str(problem["ctx"]["error"]).splitlines())
        else:
            yield key.partition(".")[0] if entry else key, _error_sentence(problem, key, entry)


def _error_sentence(problem: Any, key: str, entry: str) -> str:
    name, kind, value = entry or key, problem["type"], problem["input"]
    field = all_fields().get(key)
    if kind == "missing":
        about = field.description if field else _missing_section_hint(key)
        return f"{name} is missing: {about}"
    if kind == "extra_forbidden":
        key_names = ", ".join(f"`{name}`" for name in RewardEntry.model_fields)
        return f"{format_key(name)} is not a key of a reward. It has {key_names}."
    if kind == "value_error":
        return f"{name} is {format_value(value)}: {problem['ctx']['error']}{_default_note(field)}."
    if kind == "literal_error":
        return (
            f"{name} is {format_value(value)}: use one of "
            f"{', '.join(_allowed_words(field))}{_default_note(field)}."
        )
    if kind == "float_type" and isinstance(value, int) and not isinstance(value, bool):
        kind = "finite_number"  # an integer above the largest float
    expected = EXPECTED.get(kind, problem["msg"])
    return f"{name} is {format_value(value)}: {expected}{_default_note(field)}."


def _dotted_key(loc: tuple[int | str, ...]) -> tuple[str, str]:
    """Return the dotted key, and the indexed name (`rewards[0].weight`) if in a list, else ""."""
    key = ".".join(str(part) for part in loc if isinstance(part, str))
    key = key if key in all_fields() else re.sub(r"^\w+\.rewards\.", "rewards.", key)
    entry = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    inside = any(isinstance(part, int) for part in loc)
    return key, entry.removeprefix(".") if inside else ""


def _missing_section_hint(section: str) -> str:
    kind = recipe_sections()[section]
    needed = [f"{section}.{name}" for name, f in kind.model_fields.items() if f.is_required()]
    return {
        "model": "set the model to train, such as model: tiny.",
        "data": "set the source of prompts, such as data.task arithmetic, or data.path.",
    }.get(section, f"it needs {', '.join(needed)}.")


def _allowed_words(field: FieldInfo | None) -> tuple[str, ...]:
    """Return the allowed words of a key, or of its entries if it is a list."""
    words = () if field is None else get_args(field.annotation)
    return tuple(
        str(word) for entry in words for word in get_args(entry) or (entry,) if word != ...
    )


def _default_note(field: FieldInfo | None) -> str:
    if field is None or field.is_required() or field.default in (None, ()):
        return ""
    default = field.default
    if isinstance(default, tuple):
        return f" ([{', '.join(default)}] is the default)"
    if isinstance(default, float) and math.isfinite(default):
        return f" ({default:g} is the default)"
    return f" ({default if isinstance(default, str) else format_value(default)} is the default)"
