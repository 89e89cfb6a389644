"""Finds a word that is no check: a recipe key, a name of another trainer, a metric, an answer."""

import re
from collections.abc import Iterator
from typing import Any, get_args

from klinic.checks import CHECKS
from klinic.cli.help_page import EXAMPLES, OTHER_NAMES
from klinic.cli.words import WORDS
from klinic.evidence.metric_meanings import METRIC_MEANINGS, MetricMeaning
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.recipe import aliases, keys
from klinic.recipe.recipe import Recipe

METRICS_PAGE = "docs/reference/metrics.md describes all metrics."
MAX_MENTIONS = 8


def look_up(word: str) -> list[str]:
    """Return what a word means, one paragraph each; nothing for an unknown word.

    >>> look_up("kl_divergence")[0]  # doctest: +ELLIPSIS
    'kl_divergence is the metric `kl`, nats per token: k3 of policy against reference ...'
    >>> look_up("nonsense")
    []
    """
    found = [
        *_answers(word),
        *_estimators(word),
        *_recipe_keys(word),
        *_choices(word),
        *_other_names(word),
        *_metrics(word),
        *_commands(word),
    ]
    return list(dict.fromkeys(found))


def find_mentions(words: str) -> list[tuple[str, str]]:
    """Return entries that mention all words, by name and text; those that name them come first.

    >>> [name for name, _ in find_mentions("effective sample")]
    ['sampling/effective_sample_size']
    """
    sought = re.findall(r"[a-z0-9]+", words.lower())
    if not sought or len("".join(sought)) < 2:
        return []
    matches: list[tuple[int, int, str, str]] = []
    for name, text in _entries():
        if all(re.search(rf"(?<![a-z0-9]){each}", f"{name} {text}".lower()) for each in sought):
            in_name = sum(each in name.lower() for each in sought)
            matches.append((-in_name, len(matches), name, text))
    return [(name, text) for _, _, name, text in sorted(matches)[:MAX_MENTIONS]]


def _entries() -> Iterator[tuple[str, str]]:
    """Yield everything that can be looked up, by name and text."""
    yield from ((check.name, check.description) for check in CHECKS)
    yield from ((", ".join(words), answer) for words, answer in WORDS.items())
    yield from ((name, one.sentence) for name, one in ESTIMATORS.items())
    yield from ((key, _description(field)) for key, field in keys.recipe_fields().items())
    yield from ((", ".join(one.names), _plain(one.meaning)) for one in METRIC_MEANINGS)


def known_words() -> list[str]:
    """Return every word that `look_up` knows, for suggestions."""
    answers = [word for words in WORDS for word in words]
    recipe = [*keys.recipe_fields(), *keys.recipe_sections()]
    described = [name for one in METRIC_MEANINGS for name in one.names]
    others = [*aliases.ALIASES, *aliases.REFUSED, *_metric_names()]
    return [*answers, *recipe, *ESTIMATORS, *described, *others]


def _simplify(word: str) -> str:
    """Return a word as `WORDS` has it, without the folder of a script.

    >>> _simplify("--kl_beta"), _simplify("scripts/verify_kl_direction.py")
    ('kl-beta', 'verify-kl-direction')
    """
    name = word.strip().lower().lstrip("-").replace("_", "-").replace(" ", "-")
    return name.rpartition("/")[2].removesuffix(".py") if name.endswith(".py") else name


def _answers(word: str) -> Iterator[str]:
    for words, answer in WORDS.items():
        if _simplify(word) in words:
            yield answer


def _commands(word: str) -> Iterator[str]:
    name = _simplify(word)
    if name in EXAMPLES:
        yield f"klinic {name} --help describes the command."
    elif name in OTHER_NAMES and name not in {one for words in WORDS for one in words}:
        yield f"The command for it is klinic {OTHER_NAMES[name]}."


def _estimators(word: str) -> Iterator[str]:
    one = ESTIMATORS.get(_simplify(word).replace("-", "_"))
    if one is not None:
        yield f"{one.name} is a KL estimator, kl.estimator={one.name}. {one.sentence}"


def _choices(word: str) -> Iterator[str]:
    """Yield the keys that take this word as a value."""
    name = _simplify(word).replace("-", "_")
    for key, field in keys.recipe_fields().items():
        if name not in ESTIMATORS and name in _values(field):
            yield f"{name} is a value of {key}: {_description(field)}"


def _description(field: Any) -> str:
    return " ".join((field.description or "").split())


def _values(field: Any) -> list[str]:
    return [value for value in get_args(field.annotation) if isinstance(value, str)]


def _recipe_keys(word: str) -> Iterator[str]:
    """Yield the keys with this name, with or without their section, and the section."""
    name = aliases.canonical_name(word.strip().replace(" ", "_"))
    for key, field in keys.recipe_fields().items():
        if name in (key, key.rpartition(".")[2]):
            yield _describe_key(key, field)
    if name in keys.recipe_sections():
        about = _description(Recipe.model_fields[name])
        section = keys.recipe_sections()[name]
        yield f"{name} is a section of the recipe. {about} Keys: {', '.join(section.model_fields)}."


def _describe_key(key: str, field: Any) -> str:
    default = (
        ""
        if field.is_required()
        else f" Default: {_format(field.get_default(call_default_factory=True))}."
    )
    choices = _values(field)
    listed = f" One of {', '.join(choices)}." if choices else ""
    others = [name for name, target in aliases.ALIASES.items() if target == key]
    names = f" Other trainers: {', '.join(others)}." if others else ""
    return f"{key} is a key of the recipe. {_description(field)}{listed}{default}{names}"


def _format(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _other_names(word: str) -> Iterator[str]:
    """Yield what a name of another trainer is here, or why it has no counterpart."""
    name = aliases.canonical_name(word)
    if name in aliases.REFUSED:
        yield f"{name} has no counterpart. {aliases.REFUSED[name]}."
    target = aliases.ALIASES.get(name)
    if isinstance(target, str):
        yield f"{name} is written {target} here; klinic train accepts both."
        field = keys.recipe_fields().get(target)
        if field is not None:
            yield _describe_key(target, field)
    elif target is not None:
        yield (
            f"{name} is a name of other trainers that klinic train accepts; it prints the keys "
            "that are set. docs/reference/recipe.md lists them."
        )


def _metric_names() -> dict[str, str]:
    """Return the metric of klinic by its names elsewhere."""
    from klinic.evidence.readers.names import TRAINERS

    names = {name: target for trainer in TRAINERS for name, target in trainer.names.items()}
    return names | {"kl_divergence": "kl", "kl_div": "kl", "mean_kl": "kl", "reward_mean": "reward"}


def _metrics(word: str) -> Iterator[str]:
    """Yield the metric with this name; a name of klinic's own comes before one of others."""
    plain = word.strip().removeprefix("train/")
    own = next((one for one in METRIC_MEANINGS if one.has_metric(plain)), None)
    names = _metric_names()
    target = None if plain in names.values() else names.get(plain) or names.get(plain.lower())
    if own is not None:
        yield f"`{plain}` is a metric, {_meaning(own)}."
    if target is not None:
        meant = next((one for one in METRIC_MEANINGS if one.has_metric(target)), None)
        where = " in logs of other trainers" if own is not None else ""
        meaning = "" if meant is None else f", {_meaning(meant)}"
        yield f"{plain} is the metric `{target}`{where}{meaning}."
    if own is not None or target is not None:
        yield METRICS_PAGE


def _meaning(one: MetricMeaning) -> str:
    return f"{one.unit}: {_plain(one.meaning)}" if one.unit else _plain(one.meaning)


def _plain(markdown: str) -> str:
    """Return Markdown with the page of a link in brackets.

    >>> _plain("only with a [teacher](../how-to/distil.md)")
    'only with a teacher (docs/how-to/distil.md)'
    """
    return re.sub(r"\[([^]]*)\]\(\.\./([^)]*)\)", r"\1 (docs/\2)", markdown)
