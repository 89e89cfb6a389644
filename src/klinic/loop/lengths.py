"""Prompt lengths of a recipe: counted where rows and tokenizer are available, else assumed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klinic.loop.data import Prompts
from klinic.loop.reading import Row, is_here
from klinic.loop.rows import PROMPT
from klinic.loop.source import Given, Source, find_source
from klinic.model.adapter_files import base_of, is_adapter
from klinic.model.chat import PromptEncoder
from klinic.model.loading import BUILT_IN, LOADING_ERRORS
from klinic.recipe.recipe import Recipe

ASSUMED = 512  # tokens, if the rows are not on this machine
CHARACTERS = 3  # per token, without a tokenizer; English text has about four
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Prompt lengths in tokens, and the number of held-out rows."""

    shortest: int
    longest: int
    num_held_out: int
    """Rows that an evaluation completes."""
    assumed: str | None = None
    """The assumption behind the lengths if they were not counted."""


def find_lengths(recipe: Recipe, *, window: int | None) -> Lengths:
    """Return the prompt lengths of a recipe, refusing rows that its run would refuse."""
    if not all(is_here(path) for path in _paths(recipe)):
        held_out = recipe.loop.eval_prompts if recipe.eval or recipe.retention else 0
        return Lengths(
            shortest=ASSUMED - 1,
            longest=ASSUMED,
            num_held_out=held_out,
            assumed=f"prompts of {ASSUMED} tokens, since the rows are not on this machine",
        )
    source = find_source(recipe, Given())
    tokenizer = _tokenizer(recipe)
    if tokenizer is None:
        counted = [-(-_num_characters(row) // CHARACTERS) for row in source.rows]
        assumed = f"a token for every {CHARACTERS} characters, since the model has no tokenizer"
    else:
        counted = _count(recipe, source, tokenizer, window)
        assumed = None
    return Lengths(
        shortest=min(counted),
        longest=max(counted),
        num_held_out=_num_held_out(recipe, source),
        assumed=assumed,
    )


def _count(recipe: Recipe, source: Source, tokenizer: Any, window: int | None) -> list[int]:
    data = Prompts(
        source.rows,
        encode=PromptEncoder(tokenizer, recipe.model.name),
        per_step=recipe.loop.prompts_per_step,
        seed=recipe.seed,
    )
    data.refuse_long(window=window, max_new_tokens=recipe.sampling.max_new_tokens)
    return [len(data.prompt(index).token_ids) for index in range(len(source.rows))]


def _paths(recipe: Recipe) -> list[str]:
    held_out = [section.path for section in (recipe.eval, recipe.retention) if section is not None]
    return held_out if recipe.data.path is None else [recipe.data.path, *held_out]


def _tokenizer(recipe: Recipe) -> Any:
    name = recipe.model.name
    if name in BUILT_IN:
        from klinic.model.tiny import built_in_tokenizer

        return built_in_tokenizer(name)
    from transformers import AutoTokenizer

    folder = Path(base_of(Path(name)) if is_adapter(name) else name)
    if folder.is_dir() and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=recipe.model.trust_remote_code
        )
    except LOADING_ERRORS:
        return None


def _num_characters(row: Row) -> int:
    prompt = row[PROMPT]
    texts: Sequence[str] = (
        [prompt] if isinstance(prompt, str) else [str(m.get("content")) for m in prompt]
    )
    return sum(map(len, texts))


def _num_held_out(recipe: Recipe, source: Source) -> int:
    if source.task is not None:
        return recipe.loop.eval_prompts
    rows = [len(held.rows) for held in (source.held_out, source.kept) if held is not None]
    return min(recipe.loop.eval_prompts, max(rows, default=0))
