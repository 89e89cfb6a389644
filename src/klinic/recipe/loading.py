"""Loads recipes from files, command lines and Python calls; dumps them as YAML."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from klinic.errors import ConfigError
from klinic.recipe import aliases, keys, resolve, yaml_text
from klinic.recipe.file import read_text
from klinic.recipe.recipe import Recipe
from klinic.recipe.section import Section
from klinic.recipe.validation_messages import explain_errors, format_value

MAX_PROBLEMS = 20  # listed in one error message
BOOLEAN_WORDS = frozenset({"true", "false", "yes", "no", "on", "off"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRecipe:
    """A recipe, and the notes about its aliases to print."""

    recipe: Recipe
    notes: list[str]
    """One line for each alias used, with the key it sets."""
    renamed: Mapping[str, resolve.Setting] = field(default_factory=dict)
    """The settings that were written under another name, by their key."""
    remarks: Sequence[str] = ()
    """The notes that are about no alias."""
    name: str
    """Name of the recipe file, or of the model."""


def load_recipe(
    path: Path | str, overrides: Sequence[str] = (), *, changed: Mapping[str, Any] | None = None
) -> LoadedRecipe:
    """Load a recipe file; `changed` (from Python), then `key=value` overrides take precedence."""
    where = str(path)
    values = yaml_text.parse_yaml(read_text(Path(path)), where=where)
    if not isinstance(values, dict):
        problem = "this one is empty" if values is None else f"this one is {format_value(values)}"
        raise ConfigError(
            f"{where}: a recipe is a mapping of keys to values; "
            f"{problem}. A minimal recipe has two "
            "lines: `model: tiny` and `task: arithmetic`."
        )
    file = resolve.read_source(values.items(), where=where)
    code_source = resolve.read_source((changed or {}).items(), where="")
    resolved = _resolve_recipe([file, code_source, _parse_overrides(overrides)], where=where)
    return replace(resolved, name=Path(path).stem)


def from_keywords(**values: Any) -> LoadedRecipe:
    """Build a recipe from keywords: sections as dictionaries, keys and aliases.

    >>> loaded = from_keywords(model="tiny", task="arithmetic", kl_beta=0.02)
    >>> loaded.recipe.kl.coef, loaded.notes[1]
    (0.02, 'kl_beta is written kl.coef here: 0.02')
    """
    return from_mappings(values)


def from_mappings(*sources: Mapping[str, Any]) -> LoadedRecipe:
    """Build a recipe from several mappings of keywords; a later one takes precedence."""
    resolved = _resolve_recipe(
        [resolve.read_source(_plain_items(source), where="") for source in sources], where=""
    )
    name = resolved.recipe.model.name.rstrip("/").rpartition("/")[2]
    return replace(resolved, name=name or "model")


def _plain_items(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the items with paths as text, and sections such as `klinic.KL(...)` as mappings."""
    return [(name, _plain_value(value)) for name, value in values.items()]


def _plain_value(value: Any) -> Any:
    if isinstance(value, Section):
        return value.model_dump(exclude_unset=True)
    return fspath(value) if isinstance(value, PathLike) else value


def flags_to_overrides(args: Sequence[str]) -> list[str]:
    """Turn the flags of other trainers into `key=value` overrides; keep overrides unchanged.

    >>> flags_to_overrides(["--kl-beta", "0.02", "--bf16", "--max-steps=5", "seed=1"])
    ['kl_beta=0.02', 'bf16=true', 'max_steps=5', 'seed=1']
    """
    overrides = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            overrides.append(word)
            continue
        name, equals, value = word.partition("=")
        if not equals:
            value = _pop_flag_value(name, rest)
        overrides.append(f"{aliases.canonical_name(name)}={value}")
    return overrides


def dump_recipe(recipe: Recipe) -> str:
    """Return the whole recipe as YAML; loading it gives an equal recipe."""
    values = recipe.model_dump(mode="json")
    if recipe.kl is not None and recipe.kl.controller == "fixed":
        del values["kl"]["target"]  # loading refuses a target with a fixed coefficient
    return yaml_text.dump_yaml(values)


def _pop_flag_value(name: str, rest: list[str]) -> str:
    key = aliases.canonical_name(name)
    target = aliases.ALIASES.get(key, key)
    if key in aliases.FLAGS or key in keys.optional_sections() or keys.is_flag(str(target)):
        return rest.pop(0) if rest and rest[0].lower() in BOOLEAN_WORDS else "true"
    if rest and not rest[0].startswith("--"):
        return rest.pop(0)
    if key in aliases.ALIASES or key in keys.recipe_fields():
        raise ConfigError(f"{name} has no value. Write {name} VALUE, or {key}=VALUE.")
    return "true"


def _parse_overrides(overrides: Sequence[str]) -> resolve.Source:
    pairs, problems = [], []
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals or not name.strip():
            problems.append(
                f"{format_value(override)} is not a setting. Write key=value, such as kl.coef=0.02."
            )
            continue
        try:
            pairs.append((name, yaml_text.parse_yaml(value, where=format_value(override))))
        except ConfigError as error:
            problems.append(f"{error} Put the value in quotes if it is text.")
    source = resolve.read_source(pairs, where="")
    source.problems[:0] = problems
    return source


def _resolve_recipe(sources: Sequence[resolve.Source], *, where: str) -> LoadedRecipe:
    """Merge sources into a recipe without a name; raise ConfigError with all problems."""
    tree, settings_by_key, echoes = resolve.merge_sources(sources)
    problems = [problem for source in sources for problem in source.problems]
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        prefix = f"{where}: " if where else ""
        for key, sentence in explain_errors(error):
            setting = settings_by_key.get(key or sentence.partition(" ")[0])
            problems.append(setting.format_message(sentence) if setting else prefix + sentence)
    if problems:
        raise ConfigError(_join_problems(list(dict.fromkeys(problems))))
    alias_notes = {note for source in sources for note in source.notes}
    return LoadedRecipe(
        recipe=recipe,
        notes=echoes,
        name="",
        renamed={k: s for k, s in settings_by_key.items() if s.written_as != k},
        remarks=[note for note in echoes if note not in alias_notes],
    )


def _join_problems(problems: list[str]) -> str:
    num_omitted = len(problems) - MAX_PROBLEMS
    lines = problems[:MAX_PROBLEMS] + (
        [f"... and {num_omitted} more problems."] if num_omitted > 0 else []
    )
    return "\n".join(lines)
