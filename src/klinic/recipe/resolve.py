"""Resolves names and aliases of each source to recipe keys, and merges the sources.

A source is a file, the overrides of a command line, or the keywords of a call. Within a source a
key has one value, under any of its names. A later source takes precedence over an earlier one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from klinic.recipe import aliases, keys
from klinic.recipe.validation_messages import format_key, format_value

SHORTHAND_KEYS = {
    "model": "model.name",
    "data": "data.path",
    "eval": "eval.path",
    "reference": "reference.path",
    "teacher": "teacher.path",
}
"""Sections that accept a plain string, and the key that it sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A key, its value, and the name and file that set it."""

    key: str
    value: Any
    written_as: str
    """The name or alias the user wrote."""
    where: str
    """The recipe file; "" for a command line or a call."""

    def format_message(self, sentence: str) -> str:
        """Prefix a sentence about this setting with its file, and mention the alias used."""
        prefix = f"{self.where}: " if self.where else ""
        if self.written_as == self.key or not sentence.startswith(self.key):
            return prefix + sentence
        return f"{prefix}{self.key} (written {self.written_as}){sentence.removeprefix(self.key)}"


@dataclass(slots=True, kw_only=True)
class Source:
    """The settings of one source, with the notes about aliases and the problems to report."""

    where: str
    settings: dict[str, Setting] = field(default_factory=dict)
    unless_explicit: dict[str, Setting] = field(default_factory=dict)
    unless_set: dict[str, Setting] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add_problem(self, sentence: str) -> None:
        """Add a problem, prefixed with the file."""
        self.problems.append(f"{self.where}: {sentence}" if self.where else sentence)

    def set_key(self, key: str, value: Any, written_as: str) -> None:
        """Set a key; add a problem if this source already set it to another value."""
        key = "kl" if key == "kl.coef" and value is None else key  # null: no KL
        old = self.settings.get(key)
        if old is not None and not _is_same(old.value, value):
            self.add_problem(_contradiction_message(old, value, written_as))
        else:
            self.settings[key] = Setting(
                key=key, value=value, written_as=written_as, where=self.where
            )


def read_source(items: Iterable[tuple[str, Any]], *, where: str) -> Source:
    """Resolve the names and values of one source to settings."""
    source = Source(where=where)
    for name, value in items:
        _read_one(source, ".".join(map(aliases.canonical_name, name.split("."))), value)
    return source


def merge_sources(
    sources: Sequence[Source],
) -> tuple[dict[str, Any], dict[str, Setting], list[str]]:
    """Return the merged sections, the setting behind each key, and the notes to print."""
    tree: dict[str, Any] = {}
    settings_by_key: dict[str, Setting] = {}
    notes: list[str] = []
    for source in sources:
        notes += source.notes
        settings = source.unless_explicit | source.settings
        settings_by_key |= settings
        _apply_settings(tree, settings, notes)
    for source in sources:
        for key, setting in source.unless_set.items():
            section, _, leaf = key.partition(".")
            values = tree.get(section)
            if isinstance(values, dict) and leaf not in values:
                values[leaf] = setting.value
                notes.append(f"{key} is {setting.value}, because {setting.written_as} is set")
    return tree, settings_by_key, notes


def _apply_settings(
    tree: dict[str, Any], settings: Mapping[str, Setting], notes: list[str]
) -> None:
    """Apply the settings of a source to the tree: sections, then keys, then disabled sections."""
    whole = {key: s for key, s in settings.items() if key in keys.recipe_sections()}
    for key, setting in whole.items():
        tree[key] = {} if setting.value is None else tree.get(key) or {}
    for key, setting in settings.items():
        section, _, leaf = key.partition(".")
        if leaf:
            if section in tree and tree[section] is None:
                notes.append(f"{setting.written_as} switches {section} on again")
            tree[section] = (tree.get(section) or {}) | {leaf: setting.value}
        elif key not in whole:
            tree[key] = setting.value
    for key, setting in whole.items():
        if setting.value is None and key in keys.optional_sections():
            tree[key] = None
            notes += _unused_notes(setting, settings)


def _unused_notes(off: Setting, settings: Mapping[str, Setting]) -> list[str]:
    names = [s.written_as for key, s in settings.items() if key.startswith(f"{off.key}.")]
    if not names:
        return []
    return [f"{off.key} is off because of {off.written_as}: {', '.join(names)} not used"]


def _read_one(source: Source, name: str, value: Any) -> None:
    if name in keys.recipe_sections():
        _read_section(source, name, value)
    elif name in keys.recipe_fields():
        source.set_key(name, _wrap_reward(name, value), name)
    elif name in aliases.ALIASES:
        _read_alias(source, name, value)
    elif name in aliases.REFUSED:
        source.add_problem(f"{name} is not a key here. {aliases.REFUSED[name]}.")
    else:
        source.add_problem(_unknown_key_message(name))


def _read_section(source: Source, name: str, value: Any) -> None:
    """Read a section, or its shorthand: a model's name, a coefficient, true or false."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            _read_one(source, f"{name}.{aliases.canonical_name(str(key))}", inner)
    elif isinstance(value, bool) and name in keys.optional_sections():
        source.set_key(name, {} if value else None, name)
    elif value is None or isinstance(value, dict):
        source.set_key(name, value, name)
    elif name in SHORTHAND_KEYS and isinstance(value, str):
        source.set_key(SHORTHAND_KEYS[name], value, name)
    elif name == "kl" and isinstance(value, int | float) and not isinstance(value, bool):
        source.set_key("kl.coef", value, name)
    else:
        first = next(key for key in keys.recipe_fields() if key.startswith(f"{name}."))
        source.add_problem(
            f"{name} is {format_value(value)}: it must be a section, with keys such as {first}."
        )


def _read_alias(source: Source, name: str, value: Any) -> None:
    try:
        target = aliases.resolve_alias(name, value)
    except ValueError as error:
        source.add_problem(f"{name} is {format_value(value)}: {error}.")
        return
    for key, inner in target.sets.items():
        source.set_key(key, _wrap_reward(key, inner), name)
    for key, inner in target.unless_explicit.items():
        source.unless_explicit[key] = Setting(
            key=key, value=inner, written_as=name, where=source.where
        )
    for key, inner in target.unless_set.items():
        source.unless_set[key] = Setting(key=key, value=inner, written_as=name, where=source.where)
    source.notes.append(_alias_note(name, target))


def _alias_note(name: str, target: aliases.AliasTarget) -> str:
    sets = {**target.sets, **target.unless_explicit}
    if sets in ({"kl": {}}, {"kl": None}):
        return f"{name} is written kl here: {'off' if sets['kl'] is None else 'on'}"
    values = dict.fromkeys(_format_bare(value) for value in sets.values())
    if len(values) == 1:
        return f"{name} is written {' and '.join(sets)} here: {next(iter(values))}"
    pairs = ", ".join(f"{key}={_format_bare(value)}" for key, value in sets.items())
    return f"{name} is written {pairs} here"


def _format_bare(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(entry, str) for entry in value):
        return ", ".join(_format_bare(entry) for entry in value)
    return value if isinstance(value, str) and value.isprintable() else format_value(value)


def _wrap_reward(key: str, value: Any) -> Any:
    """Wrap a single reward in a list."""
    lone = key.rpartition(".")[2] == "rewards" and isinstance(value, str | dict)
    return [value] if lone else value


def _unknown_key_message(name: str) -> str:
    section, dot, _ = name.partition(".")
    owner = f"`{section}`" if dot and section in keys.recipe_sections() else "a recipe"
    near = keys.suggest_names(name, aliases.ALIASES)
    meant = dict.fromkeys(_with_key(key) for key in near)  # a key and its alias appear once
    hint = f" Did you mean {' or '.join(meant)}?" if meant else f" It has: {_list_keys(section)}."
    return f"{format_key(name)} is not a key of {owner}.{hint}"


def _with_key(name: str) -> str:
    target = aliases.ALIASES.get(name)
    return target if isinstance(target, str) else name


def _list_keys(section: str) -> str:
    if section in keys.recipe_sections():
        return ", ".join(keys.recipe_sections()[section].model_fields)
    return ", ".join(dict.fromkeys(key.partition(".")[0] for key in keys.recipe_fields()))


def _contradiction_message(old: Setting, value: Any, written_as: str) -> str:
    if old.written_as == written_as:
        return (
            f"{written_as} is set twice, to {format_value(old.value)} "
            f"and {format_value(value)}. Keep one."
        )
    if old.key in keys.recipe_sections():
        return f"{old.written_as} and {written_as} contradict each other about {old.key}. Keep one."
    return (
        f"{old.written_as} is {format_value(old.value)} and {written_as} "
        f"is {format_value(value)}, but both set {old.key}. "
        "Keep one."
    )


def _is_same(one: Any, other: Any) -> bool:
    # 1 equals 1.0, but not true
    try:
        return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
    except Exception:  # arrays and other objects whose comparison is not a bool
        return False
