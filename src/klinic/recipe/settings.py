"""Resolves names and aliases of each source to recipe keys, and merges the sources.

A source is a file, the overrides of a command line, or the keywords of a call. Within a source a
key has one value, under any of its names. A later source takes precedence over an earlier one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from klinic.recipe import aliases, keys
from klinic.recipe.problems import shown, shown_key

NAMED = {
    "model": "model.name",
    "data": "data.path",
    "eval": "eval.path",
    "reference": "reference.path",
}
"""Sections that accept a plain string, and the key that it sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A key, its value, and the name and file that set it."""

    key: str
    value: Any
    said: str
    """The name or alias the user wrote."""
    where: str
    """The recipe file; "" for a command line or a call."""

    def line(self, sentence: str) -> str:
        """Prefix a sentence about this setting with its file, and mention the alias used."""
        place = f"{self.where}: " if self.where else ""
        if self.said == self.key or not sentence.startswith(self.key):
            return place + sentence
        return f"{place}{self.key} (written {self.said}){sentence.removeprefix(self.key)}"


@dataclass(slots=True, kw_only=True)
class Source:
    """The settings of one source, with the notes about aliases and the problems to report."""

    where: str
    settings: dict[str, Setting] = field(default_factory=dict)
    unless_said: dict[str, Setting] = field(default_factory=dict)
    unless_chosen: dict[str, Setting] = field(default_factory=dict)
    echoes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def complain(self, sentence: str) -> None:
        """Add a problem, prefixed with the file."""
        self.problems.append(f"{self.where}: {sentence}" if self.where else sentence)

    def put(self, key: str, value: Any, said: str) -> None:
        """Set a key; add a problem if this source already set it to another value."""
        key = "kl" if key == "kl.coef" and value is None else key  # null: no KL
        old = self.settings.get(key)
        if old is not None and not _same(old.value, value):
            self.complain(_contradiction(old, value, said))
        else:
            self.settings[key] = Setting(key=key, value=value, said=said, where=self.where)


def read(items: Iterable[tuple[str, Any]], *, where: str) -> Source:
    """Resolve the names and values of one source to settings."""
    source = Source(where=where)
    for name, value in items:
        _read_one(source, ".".join(map(aliases.canonical, name.split("."))), value)
    return source


def merge(sources: Sequence[Source]) -> tuple[dict[str, Any], dict[str, Setting], list[str]]:
    """Return the merged sections, the setting behind each key, and the notes to print."""
    tree: dict[str, Any] = {}
    said: dict[str, Setting] = {}
    echoes: list[str] = []
    for source in sources:
        echoes += source.echoes
        settings = source.unless_said | source.settings
        said |= settings
        _apply(tree, settings, echoes)
    for source in sources:
        for key, setting in source.unless_chosen.items():
            section, _, leaf = key.partition(".")
            values = tree.get(section)
            if isinstance(values, dict) and leaf not in values:
                values[leaf] = setting.value
                echoes.append(f"{key} is {setting.value}, because {setting.said} is set")
    return tree, said, echoes


def _apply(tree: dict[str, Any], settings: Mapping[str, Setting], echoes: list[str]) -> None:
    """Apply the settings of a source to the tree: sections, then keys, then disabled sections."""
    whole = {key: s for key, s in settings.items() if key in keys.sections()}
    for key, setting in whole.items():
        tree[key] = {} if setting.value is None else tree.get(key) or {}
    for key, setting in settings.items():
        section, _, leaf = key.partition(".")
        if leaf:
            if section in tree and tree[section] is None:
                echoes.append(f"{setting.said} switches {section} on again")
            tree[section] = (tree.get(section) or {}) | {leaf: setting.value}
        elif key not in whole:
            tree[key] = setting.value
    for key, setting in whole.items():
        if setting.value is None and key in keys.optional_sections():
            tree[key] = None
            echoes += _unused(setting, settings)


def _unused(off: Setting, settings: Mapping[str, Setting]) -> list[str]:
    names = [s.said for key, s in settings.items() if key.startswith(f"{off.key}.")]
    if not names:
        return []
    return [f"{off.key} is off because of {off.said}: {', '.join(names)} not used"]


def _read_one(source: Source, name: str, value: Any) -> None:
    if name in keys.sections():
        _read_section(source, name, value)
    elif name in keys.fields():
        source.put(name, _listed(name, value), name)
    elif name in aliases.ALIASES:
        _read_alias(source, name, value)
    elif name in aliases.REFUSED:
        source.complain(f"{name} is not a key here. {aliases.REFUSED[name]}.")
    else:
        source.complain(_unknown(name))


def _read_section(source: Source, name: str, value: Any) -> None:
    """Read a section, or its shorthand: a model's name, a coefficient, true or false."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            _read_one(source, f"{name}.{aliases.canonical(str(key))}", inner)
    elif isinstance(value, bool) and name in keys.optional_sections():
        source.put(name, {} if value else None, name)
    elif value is None or isinstance(value, dict):
        source.put(name, value, name)
    elif name in NAMED and isinstance(value, str):
        source.put(NAMED[name], value, name)
    elif name == "kl" and isinstance(value, int | float) and not isinstance(value, bool):
        source.put("kl.coef", value, name)
    else:
        first = next(key for key in keys.fields() if key.startswith(f"{name}."))
        source.complain(
            f"{name} is {shown(value)}: it must be a section, with keys such as {first}."
        )


def _read_alias(source: Source, name: str, value: Any) -> None:
    try:
        meaning = aliases.meaning(name, value)
    except ValueError as error:
        source.complain(f"{name} is {shown(value)}: {error}.")
        return
    for key, inner in meaning.sets.items():
        source.put(key, _listed(key, inner), name)
    for key, inner in meaning.unless_said.items():
        source.unless_said[key] = Setting(key=key, value=inner, said=name, where=source.where)
    for key, inner in meaning.unless_chosen.items():
        source.unless_chosen[key] = Setting(key=key, value=inner, said=name, where=source.where)
    source.echoes.append(_echo(name, meaning))


def _echo(name: str, meaning: aliases.Meaning) -> str:
    sets = {**meaning.sets, **meaning.unless_said}
    if sets in ({"kl": {}}, {"kl": None}):
        return f"{name} is written kl here: {'off' if sets['kl'] is None else 'on'}"
    values = dict.fromkeys(_bare(value) for value in sets.values())
    if len(values) == 1:
        return f"{name} is written {' and '.join(sets)} here: {next(iter(values))}"
    pairs = ", ".join(f"{key}={_bare(value)}" for key, value in sets.items())
    return f"{name} is written {pairs} here"


def _bare(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(entry, str) for entry in value):
        return ", ".join(_bare(entry) for entry in value)
    return value if isinstance(value, str) and value.isprintable() else shown(value)


def _listed(key: str, value: Any) -> Any:
    """Wrap a single reward in a list."""
    lone = key.rpartition(".")[2] == "rewards" and isinstance(value, str | dict)
    return [value] if lone else value


def _unknown(name: str) -> str:
    section, dot, _ = name.partition(".")
    owner = f"`{section}`" if dot and section in keys.sections() else "a recipe"
    near = keys.nearest(name, aliases.ALIASES)
    meant = dict.fromkeys(_with_key(key) for key in near)  # a key and its alias appear once
    hint = f" Did you mean {' or '.join(meant)}?" if meant else f" It has: {_contents(section)}."
    return f"{shown_key(name)} is not a key of {owner}.{hint}"


def _with_key(name: str) -> str:
    target = aliases.ALIASES.get(name)
    return target if isinstance(target, str) else name


def _contents(section: str) -> str:
    if section in keys.sections():
        return ", ".join(keys.sections()[section].model_fields)
    return ", ".join(dict.fromkeys(key.partition(".")[0] for key in keys.fields()))


def _contradiction(old: Setting, value: Any, said: str) -> str:
    if old.said == said:
        return f"{said} is set twice, to {shown(old.value)} and {shown(value)}. Keep one."
    if old.key in keys.sections():
        return f"{old.said} and {said} contradict each other about {old.key}. Keep one."
    return (
        f"{old.said} is {shown(old.value)} and {said} is {shown(value)}, but both set {old.key}. "
        "Keep one."
    )


def _same(one: Any, other: Any) -> bool:
    # 1 equals 1.0, but not true
    try:
        return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
    except Exception:  # arrays and other objects whose comparison is not a bool
        return False
