"""Recipes that cannot work, made from a seed: the same seed makes the same ones in any process."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import get_args

import yaml

from klinic.recipe.aliases import ALIASES, REFUSED
from klinic.recipe.keys import recipe_fields, recipe_sections
from klinic.recipe.resolve import SHORTHAND_KEYS

LETTERS = "abcdefghijklmnopqrstuvwxyz_"
GOOD = {"model": {"name": "tiny"}, "data": {"task": "arithmetic"}}
WORDS = ("zebra", "quux", "hidden_layers", "Überraschung", "ключ", "学習率", "x" * 300, "a b", "é")


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """A file that must be refused, and what its refusal must speak of."""

    kind: str
    content: bytes
    key: str | None = None
    """The bad key, where there is one."""
    nearest: str | None = None
    """The key that was meant, where a person could tell."""


def malformed(num: int, seed: int) -> Iterator[Malformed]:
    """Yield so many recipes, of all kinds alike."""
    for index, kind in enumerate(KINDS):
        yield from of_kind(kind, num // len(KINDS) + (index < num % len(KINDS)), seed)


def of_kind(kind: str, num: int, seed: int) -> Iterator[Malformed]:
    """Yield so many recipes of one kind."""
    draw = random.Random(f"{seed} {kind}")  # noqa: S311 - the same stream, not a secret one
    for _ in range(num):
        yield KINDS[kind](draw, kind)


def _text(values: object) -> bytes:
    return yaml.safe_dump(values, allow_unicode=True).encode()


def _with(key: str, value: object) -> dict[str, object]:
    """Return a good recipe but for one key, in its section or dotted at the top."""
    section, _, leaf = key.partition(".")
    values: dict[str, object] = {name: dict(inner) for name, inner in GOOD.items()}
    if not leaf:
        return values | {key: value}
    inner = values.get(section)
    return values | {section: {**(inner if isinstance(inner, dict) else {}), leaf: value}}


def slip(draw: random.Random, name: str, num_edits: int) -> str:
    """Return a name with characters added, dropped, changed or swapped."""
    for _ in range(num_edits):
        at = draw.randrange(len(name))
        choice = draw.randrange(4)
        if choice == 0:
            name = name[:at] + draw.choice(LETTERS) + name[at:]
        elif choice == 1 and len(name) > 3:
            name = name[:at] + name[at + 1 :]
        elif choice == 2:
            name = name[:at] + draw.choice(LETTERS) + name[at + 1 :]
        else:
            name = name[:at] + name[at : at + 2][::-1] + name[at + 2 :]
    return name


def _typo(draw: random.Random, kind: str) -> Malformed:
    names = set(recipe_fields()) | set(recipe_sections()) | set(ALIASES) | set(REFUSED)
    while True:
        key = draw.choice([key for key in recipe_fields() if len(key.rpartition(".")[2]) > 3])
        section, dot, leaf = key.rpartition(".")
        wrong = section + dot + slip(draw, leaf, draw.choice([1, 1, 2]))
        if wrong not in names:
            return Malformed(kind=kind, content=_text(_with(wrong, 1)), key=wrong, nearest=key)


def _wrong_type(draw: random.Random, kind: str) -> Malformed:
    key, field = draw.choice(list(recipe_fields().items()))
    wrong: list[object] = [{"a": 1}, {1: 2}, 1.5, True, [[1]]]  # what no key of a recipe takes
    if field.annotation in (int, float):
        wrong = ["eight", True, [1], {"a": 1}, "8", "0x10", None, "2024-01-01"]
    elif field.annotation is bool:
        wrong = [1, 0, "maybe", 1.0, [True], None]
    elif "float" in str(field.annotation):  # a number, or null for none
        wrong.remove(1.5)
    return Malformed(kind=kind, content=_text(_with(key, _unless_off(key, draw, wrong))), key=key)


def _unless_off(key: str, draw: random.Random, wrong: list[object]) -> object:
    """Choose a wrong value; null is a right one for `kl.coef`, where it means no KL."""
    return draw.choice([value for value in wrong if value is not None or key != "kl.coef"])


def _out_of_range(draw: random.Random, kind: str) -> Malformed:
    numbers = [key for key, field in recipe_fields().items() if field.annotation in (int, float)]
    value = draw.choice([-1, -7, -(10**30), -(2**63)])
    key = draw.choice(numbers)
    return Malformed(kind=kind, content=_text(_with(key, value)), key=key)


def _huge(draw: random.Random, kind: str) -> Malformed:
    key = draw.choice([key for key, field in recipe_fields().items() if field.annotation is int])
    value = 10 ** draw.choice([20, 100, 1000, 4000])
    return Malformed(kind=kind, content=_text(_with(key, value)), key=key)


def _not_finite(draw: random.Random, kind: str) -> Malformed:
    key = draw.choice([key for key, field in recipe_fields().items() if field.annotation is float])
    value = draw.choice([float("nan"), float("inf"), -float("inf"), 10**400])
    return Malformed(kind=kind, content=_text(_with(key, value)), key=key)


def _no_choice(draw: random.Random, kind: str) -> Malformed:
    choices = [key for key, field in recipe_fields().items() if _is_choice(field.annotation)]
    key = draw.choice(choices)
    return Malformed(kind=kind, content=_text(_with(key, draw.choice(WORDS))), key=key)


def _is_choice(annotation: object) -> bool:
    return bool(get_args(annotation)) and all(isinstance(c, str) for c in get_args(annotation))


def _wrong_section(draw: random.Random, kind: str) -> Malformed:
    leaves = [key.rpartition(".")[2] for key in recipe_fields()]
    key = draw.choice(
        [k for k in recipe_fields() if "." in k and leaves.count(k.rpartition(".")[2]) == 1]
    )
    section, _, leaf = key.partition(".")
    other = draw.choice([name for name in recipe_sections() if name != section])
    wrong = f"{other}.{leaf}"
    return Malformed(kind=kind, content=_text(_with(wrong, 1)), key=wrong, nearest=key)


def _unknown(draw: random.Random, kind: str) -> Malformed:
    word = draw.choice(WORDS)
    section = draw.choice(["", "kl.", "loop.", "learner."])
    return Malformed(kind=kind, content=_text(_with(section + word, 1)), key=word[:20])


def _refused_name(draw: random.Random, kind: str) -> Malformed:
    name = draw.choice(list(REFUSED))
    return Malformed(kind=kind, content=_text(_with(name, draw.choice([1, 0.9, None]))), key=name)


def _contradiction(draw: random.Random, kind: str) -> Malformed:
    name = draw.choice([name for name, target in ALIASES.items() if isinstance(target, str)])
    values = _with(name, 3) | {str(ALIASES[name]): 4}
    return Malformed(kind=kind, content=_text(values), key=str(ALIASES[name]))


def _no_section(draw: random.Random, kind: str) -> Malformed:
    name = draw.choice(list(recipe_sections()))
    value = draw.choice([[1, 2], [], [{"coef": 1}], "" if name in SHORTHAND_KEYS else "text"])
    return Malformed(kind=kind, content=_text(GOOD | {name: value}), key=name)


def _twice(draw: random.Random, kind: str) -> Malformed:
    key = draw.choice(list(recipe_fields())).rpartition(".")[2]
    text = f"model: tiny\ntask: arithmetic\nloop:\n  {key}: 1\n  {key}: 1\n"
    return Malformed(kind=kind, content=text.encode(), key=key)


def _missing(draw: random.Random, kind: str) -> Malformed:
    name = draw.choice(list(GOOD))
    return Malformed(
        kind=kind, content=_text({k: v for k, v in GOOD.items() if k != name}), key=name
    )


def _not_a_mapping(draw: random.Random, kind: str) -> Malformed:
    contents = ["", "# nothing", "- a\n- b", "42", "text", "null", "[]", "---\n---\n", "2024-01-01"]
    return Malformed(kind=kind, content=draw.choice(contents).encode())


def _deep(draw: random.Random, kind: str) -> Malformed:
    depth = draw.choice([30] * 30 + [1000, 20_000])
    opening = draw.choice(["[", "{a: ", "- ", "? "])
    return Malformed(kind=kind, content=b"model: tiny\nx:\n  " + (opening * depth).encode())


def _bomb(draw: random.Random, kind: str) -> Malformed:
    bombs = [
        "a: &a [*a]",
        "a: &a {b: *a}",
        "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
        "kl: &k {coef: 1}\nloop:\n  <<: *k",
        "a: !!python/object/apply:os.system [ls]",
        "a: !!timestamp x",
        "a: !!int x",
        "? [a, b]\n: 1",
        "a: *nothing",
        "%YAML 9.9\n---\na: 1",
        "seed: " + "9" * 5000,
    ]
    return Malformed(kind=kind, content=draw.choice(bombs).encode())


def _garbage(draw: random.Random, kind: str) -> Malformed:
    noise = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 80)))
    good = _text(GOOD)
    at = draw.randrange(len(good))
    return Malformed(kind=kind, content=good[:at] + noise + b"\xff" + good[at:])


def _syntax(draw: random.Random, kind: str) -> Malformed:
    broken = ["a: [1", "a: {b: 1", "a: 'x", "\tkey: 1", "a: b: c", "a: @x", "a: \x00", "a: `x`"]
    return Malformed(kind=kind, content=_text(GOOD) + draw.choice(broken).encode())


KINDS: dict[str, Callable[[random.Random, str], Malformed]] = {
    "typo": _typo,
    "wrong type": _wrong_type,
    "out of range": _out_of_range,
    "huge": _huge,
    "not finite": _not_finite,
    "no choice": _no_choice,
    "wrong section": _wrong_section,
    "unknown": _unknown,
    "refused name": _refused_name,
    "contradiction": _contradiction,
    "no section": _no_section,
    "twice": _twice,
    "missing": _missing,
    "not a mapping": _not_a_mapping,
    "deep": _deep,
    "bomb": _bomb,
    "garbage": _garbage,
    "syntax": _syntax,
}
