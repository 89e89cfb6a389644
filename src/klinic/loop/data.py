"""Rows dealt out as prompts, step by step."""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from klinic.errors import ConfigError, DataError, first_line
from klinic.evidence.rollout import Prompt
from klinic.loop.reading import Row, shown
from klinic.loop.rows import PROMPT
from klinic.model.chat import PromptEncoder

TOOLS = "tools"  # the column whose tool descriptions go into the chat template
ORDER = 0x0DA7A  # keeps the order of the rows apart from the streams that completions use


class Prompts:
    """The rows in a shuffled order that is a function of seed and step: nothing to save."""

    def __init__(
        self, rows: Sequence[Row], *, encode: PromptEncoder, per_step: int, seed: int
    ) -> None:
        if per_step > len(rows):
            raise ConfigError(
                f"loop.prompts_per_step is {per_step}, but there are {len(rows)} rows: a prompt "
                f"would be in a step twice. Use {len(rows)} or fewer."
            )
        self._rows = rows
        self._encode = encode
        self._per_step = per_step
        self._seed = seed

    def at(self, step: int) -> list[Prompt]:
        """Return the prompts of a step, counted from 1. The remainder of an epoch is left out."""
        epoch, place = divmod(step - 1, len(self._rows) // self._per_step)
        stream = np.random.Generator(
            np.random.Philox(np.random.SeedSequence((self._seed, ORDER, epoch)))
        )
        order = stream.permutation(len(self._rows))
        chosen = order[place * self._per_step : (place + 1) * self._per_step]
        return [self.prompt(int(index)) for index in chosen]

    def prompt(self, index: int) -> Prompt:
        """Return one row as a prompt."""
        return make_prompt(self._rows[index], index, self._encode)

    def refuse_long(self, *, window: int | None, max_new_tokens: int) -> None:
        """Refuse rows that would not fit the model, before the first step."""
        if window is None:
            return
        for index in range(len(self._rows)):
            longest = len(self.prompt(index).token_ids) + max_new_tokens
            if longest > window:
                raise DataError(
                    f"row {index + 1}: its prompt and completions of sampling.max_new_tokens = "
                    f"{max_new_tokens} come to {longest} tokens, and the model takes {window}. "
                    "Shorten the prompt or the limit, or leave the row out."
                )

    @cached_property
    def digest(self) -> str:
        """Return a hash of all rows, by which a resumed run knows them again."""
        total = hashlib.sha256()
        for number, row in enumerate(self._rows, 1):
            try:
                total.update(_json_of(dict(row)))
            except Exception as error:  # a value may be an object of the user's
                raise DataError(_no_json(row, number)) from error
        return total.hexdigest()


def _json_of(row: Any) -> bytes:
    return json.dumps(row, sort_keys=True, default=_canonical).encode()


def _no_json(row: Row, number: int) -> str:
    """Return which column of a row no digest can be made of, and why."""
    for name, value in row.items():
        try:
            _json_of(value)
        except Exception as error:
            return (
                f"row {number}: `{name}` is {shown(value)}, which cannot be written as JSON "
                f"({first_line(error)}), so a resumed run could not know it again. Use text, "
                "numbers, lists and mappings with text as keys."
            )
    return f"row {number} cannot be written as JSON. Name its columns with text."


def _canonical(value: Any) -> Any:
    """Return something that JSON can hold, the same in every process."""
    return sorted(map(repr, value)) if isinstance(value, set | frozenset) else repr(value)


def make_prompt(row: Row, index: int, encode: PromptEncoder) -> Prompt:
    """Return a row as a prompt with its token ids."""
    try:
        encoded = encode(row[PROMPT], row.get(TOOLS))
    except DataError as error:
        raise DataError(f"row {index + 1}: {error}") from error
    token_ids = np.array(encoded.token_ids, dtype=np.int64)
    if not len(token_ids):
        raise DataError(f"row {index + 1}: `prompt` is {shown(row[PROMPT])}, which has no tokens.")
    return Prompt(
        index=index,
        text=encoded.text,
        token_ids=token_ids,
        columns={key: value for key, value in row.items() if key != PROMPT},
        messages=encoded.messages,
    )
