"""Batches of prompts from shuffled rows."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from klinic.data.dataset import PROMPT_COLUMN, Row, short_repr
from klinic.errors import ConfigError, DataError, first_line
from klinic.evidence.rollout import Prompt
from klinic.model.chat import PromptEncoder

TOOLS_COLUMN = "tools"  # the column with tool descriptions for the chat template
NUM_COUNTED = 1_000  # texts encoded at a time
ORDER_STREAM = 0x0DA7A  # separates the RNG stream of the row order from those of sampling


class PromptDataset:
    """Rows in a shuffled order, a function of seed and batch index: no state to save."""

    def __init__(
        self, rows: Sequence[Row], *, encode: PromptEncoder, prompts_per_step: int, seed: int
    ) -> None:
        if prompts_per_step > len(rows):
            raise ConfigError(
                f"loop.prompts_per_step is {prompts_per_step}, "
                f"but there are {len(rows)} rows: a step "
                f"would repeat a prompt. Use {len(rows)} or fewer."
            )
        self._rows = rows
        self._encode = encode
        self._prompts_per_step = prompts_per_step
        self._seed = seed

    def batch_at(self, batch_index: int) -> list[Prompt]:
        """Return a batch of prompts, counted from 1. The remainder of an epoch is dropped."""
        epoch, batch_in_epoch = divmod(batch_index - 1, len(self._rows) // self._prompts_per_step)
        rng = np.random.Generator(
            np.random.Philox(np.random.SeedSequence((self._seed, ORDER_STREAM, epoch)))
        )
        order = rng.permutation(len(self._rows))
        row_indices = order[
            batch_in_epoch * self._prompts_per_step : (batch_in_epoch + 1) * self._prompts_per_step
        ]
        return [self.prompt_at(int(index)) for index in row_indices]

    def prompt_at(self, index: int) -> Prompt:
        """Return one row as a prompt."""
        return make_prompt(self._rows[index], index, self._encode)

    def refuse_long_prompts(self, *, window: int | None, max_new_tokens: int) -> None:
        """Refuse rows that exceed the context window, before the first step."""
        if window is None:
            return
        for index, num_tokens in enumerate(self._prompt_lengths()):
            longest = num_tokens + max_new_tokens
            if longest > window:
                raise DataError(
                    f"row {index + 1}: its prompt and completions of sampling.max_new_tokens = "
                    f"{max_new_tokens} come to {longest} tokens, and the model takes {window}. "
                    "Shorten the prompt, lower the limit, or remove the row."
                )

    def _prompt_lengths(self) -> Iterator[int]:
        """Yield the tokens of each prompt; texts are encoded many at a time."""
        for start in range(0, len(self._rows), NUM_COUNTED):
            prompts = [row[PROMPT_COLUMN] for row in self._rows[start : start + NUM_COUNTED]]
            are_texts = all(isinstance(prompt, str) for prompt in prompts)
            counts = self._encode.count_tokens(prompts) if are_texts else [0] * len(prompts)
            for index, count in enumerate(counts, start):
                yield count or len(self.prompt_at(index).token_ids)  # which refuses an empty one

    @cached_property
    def digest(self) -> str:
        """Hash of all rows, which a resumed run compares with its own."""
        total = hashlib.sha256()
        for number, row in enumerate(self._rows, 1):
            try:
                total.update(_row_json(dict(row)))
            except Exception as error:  # a value may be any Python object
                raise DataError(_explain_not_json(row, number)) from error
        return total.hexdigest()


def _row_json(row: Any) -> bytes:
    return json.dumps(row, sort_keys=True, default=_canonical_value).encode()


def _explain_not_json(row: Row, number: int) -> str:
    """Return which column of a row cannot be written as JSON, and why."""
    for name, value in row.items():
        try:
            _row_json(value)
        except Exception as error:
            return (
                f"row {number}: `{name}` is {short_repr(value)}, which cannot be written as JSON "
                f"({first_line(error)}), so a resumed run could not compare it. Use text, "
                "numbers, lists and mappings with text as keys."
            )
    return f"row {number} cannot be written as JSON. Name its columns with text."


def _canonical_value(value: Any) -> Any:
    """Return a JSON value that is the same in every process."""
    return sorted(map(repr, value)) if isinstance(value, set | frozenset) else repr(value)


def make_prompt(row: Row, index: int, encode: PromptEncoder) -> Prompt:
    """Return a row as a prompt with its token ids."""
    try:
        encoded = encode(row[PROMPT_COLUMN], row.get(TOOLS_COLUMN))
    except DataError as error:
        raise DataError(f"row {index + 1}: {error}") from error
    token_ids = np.array(encoded.token_ids, dtype=np.int64)
    if not len(token_ids):
        raise DataError(
            f"row {index + 1}: `prompt` is {short_repr(row[PROMPT_COLUMN])}, which has no tokens."
        )
    return Prompt(
        index=index,
        text=encoded.text,
        token_ids=token_ids,
        columns={key: value for key, value in row.items() if key != PROMPT_COLUMN},
        messages=encoded.messages,
    )
