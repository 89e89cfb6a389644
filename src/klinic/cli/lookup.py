"""Finds a word that is no check: a recipe key, a name of another trainer, a metric, an answer."""

from collections.abc import Iterator
from typing import Any, get_args

from klinic.cli.words import WORDS
from klinic.recipe import aliases, keys
from klinic.recipe.recipe import Recipe

METRICS_PAGE = "docs/reference/metrics.md describes all metrics."


def look_up(word: str) -> list[str]:
    """Return what a word means, one paragraph each; nothing for an unknown word.

    >>> look_up("kl_divergence")[0]
    'kl_divergence is the metric `kl`: KL(policy || reference), nats per token.'
    >>> look_up("nonsense")
    []
    """
    found = [*_answers(word), *_recipe_keys(word), *_other_names(word), *_metrics(word)]
    return list(dict.fromkeys(found))


def known_words() -> list[str]:
    """Return every word that `look_up` knows, for suggestions."""
    answers = [word for words in WORDS for word in words]
    recipe = [*keys.recipe_fields(), *keys.recipe_sections()]
    return [*answers, *recipe, *aliases.ALIASES, *aliases.REFUSED, *_metric_names()]


def _simplify(word: str) -> str:
    return word.strip().lower().lstrip("-").replace("_", "-").replace(" ", "-")


def _answers(word: str) -> Iterator[str]:
    for words, answer in WORDS.items():
        if _simplify(word) in words:
            yield answer


def _recipe_keys(word: str) -> Iterator[str]:
    """Yield the keys with this name, with or without their section, and the section."""
    name = aliases.canonical_name(word)
    for key, field in keys.recipe_fields().items():
        if name in (key, key.rpartition(".")[2]):
            yield _describe_key(key, field)
    if name in keys.recipe_sections():
        about = Recipe.model_fields[name].description or ""
        section = keys.recipe_sections()[name]
        yield f"{name} is a section of the recipe. {about} Keys: {', '.join(section.model_fields)}."


def _describe_key(key: str, field: Any) -> str:
    default = (
        ""
        if field.is_required()
        else f" Default: {_format(field.get_default(call_default_factory=True))}."
    )
    choices = [value for value in get_args(field.annotation) if isinstance(value, str)]
    listed = f" One of {', '.join(choices)}." if choices else ""
    others = [name for name, target in aliases.ALIASES.items() if target == key]
    names = f" Other trainers: {', '.join(others)}." if others else ""
    return f"{key} is a key of the recipe. {field.description or ''}{listed}{default}{names}"


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


MEANINGS = {
    "kl": "KL(policy || reference), nats per token",
    "reward": "mean reward of the completions",
    "grad_norm": "gradient norm before clipping",
    "entropy": "entropy of the policy, nats per token",
    "loss": "the minimised loss: policy term plus KL penalty",
    "completions/clipped_ratio": "fraction of completions that reached the length limit",
}


def _metrics(word: str) -> Iterator[str]:
    names, plain = _metric_names(), word.strip().removeprefix("train/")
    target = plain if plain in names.values() else names.get(plain) or names.get(plain.lower())
    if target is None:
        return
    same = f"`{target}` is a metric" if plain == target else f"{plain} is the metric `{target}`"
    yield f"{same}: {MEANINGS[target]}." if target in MEANINGS else f"{same}."
    yield METRICS_PAGE
