"""Prompt lengths of a recipe: counted where rows and tokenizer are available, else assumed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klinic.data.dataset import PROMPT_COLUMN, Row, is_local_path
from klinic.data.prompts import PromptDataset
from klinic.model.adapter_files import base_model_name, is_adapter
from klinic.model.chat import PromptEncoder
from klinic.model.loading import BUILT_IN_MODELS, LOADING_ERRORS
from klinic.recipe.recipe import Recipe
from klinic.training.source import PythonInputs, TaskData, load_task_data

ASSUMED_PROMPT_TOKENS = 512  # tokens, if the rows are not on this machine
CHARACTERS_PER_TOKEN = 3  # per token, without a tokenizer; English text has about four
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLengths:
    """Prompt lengths in tokens, and the number of held-out rows."""

    shortest: int
    longest: int
    num_held_out: int
    """Rows that an evaluation completes."""
    assumed: str | None = None
    """The assumption behind the lengths if they were not counted."""


def find_prompt_lengths(recipe: Recipe, *, window: int | None) -> PromptLengths:
    """Return the prompt lengths of a recipe, refusing rows that its run would refuse."""
    if not all(is_local_path(path) for path in _data_paths(recipe)):
        held_out = recipe.loop.eval_prompts if recipe.eval or recipe.retention else 0
        return PromptLengths(
            shortest=ASSUMED_PROMPT_TOKENS - 1,
            longest=ASSUMED_PROMPT_TOKENS,
            num_held_out=held_out,
            assumed=(
                f"prompts of {ASSUMED_PROMPT_TOKENS} tokens, since the rows are not on this machine"
            ),
        )
    task_data = load_task_data(recipe, PythonInputs())
    tokenizer = _load_tokenizer(recipe)
    if tokenizer is None:
        counted = [-(-_num_characters(row) // CHARACTERS_PER_TOKEN) for row in task_data.rows]
        assumed = (
            f"a token for every {CHARACTERS_PER_TOKEN} characters, since the model has no tokenizer"
        )
    else:
        counted = _count_tokens(recipe, task_data, tokenizer, window)
        assumed = None
    return PromptLengths(
        shortest=min(counted),
        longest=max(counted),
        num_held_out=_num_held_out(recipe, task_data),
        assumed=assumed,
    )


def _count_tokens(
    recipe: Recipe, task_data: TaskData, tokenizer: Any, window: int | None
) -> list[int]:
    prompts = PromptDataset(
        task_data.rows,
        encode=PromptEncoder(tokenizer, recipe.model.name),
        prompts_per_step=recipe.loop.prompts_per_step,
        seed=recipe.seed,
    )
    prompts.refuse_long_prompts(window=window, max_new_tokens=recipe.sampling.max_new_tokens)
    return [len(prompts.prompt_at(index).token_ids) for index in range(len(task_data.rows))]


def _data_paths(recipe: Recipe) -> list[str]:
    held_out = [section.path for section in (recipe.eval, recipe.retention) if section is not None]
    return held_out if recipe.data.path is None else [recipe.data.path, *held_out]


def _load_tokenizer(recipe: Recipe) -> Any:
    name = recipe.model.name
    if name in BUILT_IN_MODELS:
        from klinic.model.tiny import built_in_tokenizer

        return built_in_tokenizer(name)
    from transformers import AutoTokenizer

    folder = Path(base_model_name(Path(name)) if is_adapter(name) else name)
    if folder.is_dir() and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=recipe.model.trust_remote_code
        )
    except LOADING_ERRORS:
        return None


def _num_characters(row: Row) -> int:
    prompt = row[PROMPT_COLUMN]
    texts: Sequence[str] = (
        [prompt] if isinstance(prompt, str) else [str(m.get("content")) for m in prompt]
    )
    return sum(map(len, texts))


def _num_held_out(recipe: Recipe, task_data: TaskData) -> int:
    if task_data.task is not None:
        return recipe.loop.eval_prompts
    rows = [
        len(split.rows)
        for split in (task_data.held_out, task_data.retention_set)
        if split is not None
    ]
    return min(recipe.loop.eval_prompts, max(rows, default=0))
