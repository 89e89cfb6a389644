"""Joins rows by their token ids: trained rows to sampled ones, and tokens to the sampler's output.

A position in a batch identifies no row: trainers shuffle, sort, filter and pack rows. Rows with
equal ids are interchangeable.
"""

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from jaxtyping import Bool, Float, Int

MIN_LAST_TOKENS = 2  # tokens of a last turn that is found by them alone

UNMATCHED = -1
"""The index of a row whose ids equal those of no sampled row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Emission:
    """Tokens that a model sampled after one context."""

    context: Int[np.ndarray, "C"] | None
    """The ids that the model attended to; None if it received no ids."""
    token_ids: Int[np.ndarray, "E"]
    logp: Float[np.ndarray, "E"] | None = None
    is_ended: bool = False
    """Whether the last token ends the completion."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSources:
    """The tokens of one completion, compared with what the sampler emitted."""

    emitted: Bool[np.ndarray, "N"]
    """True where the sampler emitted a token at this place; False for inserted tokens."""
    replaced: Bool[np.ndarray, "N"]
    """True where it emitted another token than the completion has."""
    logp: Float[np.ndarray, "N"]
    """Log-prob of the token; NaN where it was inserted, and from the first replaced token of an
    emission on: the sampler attended to other ids there."""
    is_reencoded: bool = False
    """Whether ids were replaced in the middle: the end agrees again, or the sampler went on from
    the new ids."""
    is_elsewhere: bool = False
    """Whether the last tokens were sampled after other ids than the row has before them."""
    context: Int[np.ndarray, "C"] | None = None
    """The context of the first emission."""
    first_emission: int = UNMATCHED
    """The index of the first emission."""


def row_key(prompt_ids: np.ndarray, completion_ids: np.ndarray, pad_id: int | None = None) -> bytes:
    """Return a key that is equal for rows of equal ids; padding at the end does not count.

    >>> prompt = np.array([5])
    >>> row_key(prompt, np.array([7, 0, 0]), 0) == row_key(prompt, np.array([7]), 0)
    True
    """
    ids = np.asarray(completion_ids, np.int64)
    if pad_id is not None:
        tokens = np.flatnonzero(ids != pad_id)
        ids = ids[: tokens[-1] + 1 if tokens.size else 0]
    prompt = np.asarray(prompt_ids, np.int64)
    return len(prompt).to_bytes(8, "little") + prompt.tobytes() + ids.tobytes()


def match_rows(
    trained: Sequence[bytes],
    sampled: Sequence[bytes],
    *,
    expected: Sequence[int],
    trained_order: Sequence[float] | None = None,
    sampled_order: Sequence[float] | None = None,
) -> Int[np.ndarray, "B"]:
    """Return the sampled row of each trained row, by their keys; UNMATCHED where there is none.

    `expected` are the sampled rows by position, and are taken where the keys agree. Among equal
    rows that moved, the order of `trained_order` (advantages) follows `sampled_order` (rewards).

    >>> match_rows([b"b", b"a", b"c"], [b"a", b"b"], expected=[0, 1, 2]).tolist()
    [1, 0, -1]
    >>> match_rows([b"a", b"a"], [b"a", b"a"], expected=[1, 0]).tolist()
    [1, 0]
    """
    rows_of_key, samples_of_key = _rows_by_key(trained), _rows_by_key(sampled)
    matched = np.full(len(trained), UNMATCHED, np.int64)
    for key, rows in rows_of_key.items():
        samples = samples_of_key.get(key)
        if not samples:
            continue
        places = [expected[row] for row in rows]
        if len(set(places)) == len(places) and set(places) <= set(samples):
            matched[rows] = places
            continue
        first_choice = [sample for sample in samples if sample in places]
        chosen = (first_choice + [s for s in samples if s not in places])[: len(rows)]
        chosen = _sort_rows(chosen, sampled_order)
        for at, row in enumerate(_sort_rows(rows, trained_order)):
            matched[row] = chosen[min(at, len(chosen) - 1)]
    return matched


def _rows_by_key(keys: Sequence[bytes]) -> Mapping[bytes, list[int]]:
    rows: defaultdict[bytes, list[int]] = defaultdict(list)
    for row, key in enumerate(keys):
        rows[key].append(row)
    return rows


def _sort_rows(rows: list[int], order: Sequence[float] | None) -> list[int]:
    return rows if order is None else sorted(rows, key=lambda row: order[row])


class EmissionIndex:
    """The emissions of one generation by their contexts; several calls and turns are allowed."""

    def __init__(self, emissions: Sequence[Emission]) -> None:
        self._emissions = emissions
        self._by_context: defaultdict[bytes, list[int]] = defaultdict(list)
        self._by_tokens: defaultdict[bytes, list[int]] = defaultdict(list)
        for number, emission in enumerate(emissions):
            if emission.context is not None:
                self._by_context[emission.context.tobytes()].append(number)
                self._by_tokens[emission.token_ids.astype(np.int64).tobytes()].append(number)
        known = [(len(e.context), len(e.token_ids)) for e in emissions if e.context is not None]
        self._context_lengths = sorted({length for length, _ in known})
        self._token_lengths = sorted({length for _, length in known})

    def trace_tokens(
        self,
        prompt_ids: np.ndarray,
        completion_ids: np.ndarray,
        *,
        row: int,
        num_rows: int,
        taken: Container[int] = frozenset(),
    ) -> TokenSources | None:
        """Return the sources of a completion's tokens; None if no emission belongs to the row.

        An emission belongs to a row if the row's ids begin with its context. Without one, the
        emission at the row's index is taken if there are as many emissions as rows and it agrees in
        the first token: the sampler then received another prompt. A last turn whose context differs
        from the row after the turns before is found by its tokens. Emissions that other rows have
        unchanged, `taken`, are the last choice.
        """
        sources = _empty_sources(len(completion_ids))
        ids = np.concatenate([prompt_ids, completion_ids]).astype(np.int64)
        end, first, is_reencoded = len(prompt_ids), None, False
        for length in self._context_lengths:
            if not end <= length < len(ids):
                continue
            number = self._best_emission(ids, length, row, taken)
            if number is None:
                continue
            emission = self._emissions[number]
            is_reencoded |= bool(sources.replaced.any())  # and the sampler went on from there
            first = number if first is None else first
            start = length - len(prompt_ids)
            end = length + _copy_emission(sources, emission, ids[length:], start)
            if sources.replaced[start:].any() and emission.token_ids[-1] == ids[-1]:
                sources.emitted[start:], is_reencoded = True, True
        if first is None:
            return self._trace_by_position(completion_ids, row, num_rows)
        is_elsewhere = False
        if end < len(ids) and (last := self._last_turn(ids, end)) is not None:
            start = len(ids) - len(last.token_ids)
            _copy_emission(sources, last, ids[start:], start - len(prompt_ids))
            is_elsewhere = True
        return replace(
            sources,
            context=self._emissions[first].context,
            first_emission=first,
            is_reencoded=is_reencoded,
            is_elsewhere=is_elsewhere,
        )

    def _last_turn(self, ids: np.ndarray, end: int) -> Emission | None:
        """Return the emission that has the row's last ids and its first ones up to `end`."""
        lengths = [n for n in self._token_lengths if MIN_LAST_TOKENS <= n <= len(ids) - end]
        tails = (self._by_tokens.get(ids[-length:].tobytes(), ()) for length in lengths)
        for number in sorted(chain.from_iterable(tails)):
            emission = self._emissions[number]
            context, before = emission.context, ids[: -len(emission.token_ids)]
            if context is None or len(context) <= end:
                continue
            if np.array_equal(context[:end], ids[:end]) and not np.array_equal(context, before):
                return emission
        return None

    def _best_emission(
        self, ids: np.ndarray, length: int, row: int, taken: Container[int]
    ) -> int | None:
        rest = ids[length:]

        def agreement(number: int) -> tuple[bool, bool, int, bool]:
            emission = self._emissions[number]
            sampled = emission.token_ids
            num_equal = common_prefix(sampled, rest)
            is_whole = num_equal >= len(sampled) - emission.is_ended
            if not is_whole:  # then the row may have been encoded again, and ends alike
                num_equal += common_prefix(sampled[num_equal:][::-1], rest[num_equal:][::-1])
            return number not in taken, is_whole, num_equal, number == row

        numbers = self._by_context.get(ids[:length].tobytes(), [])
        return max(numbers, key=agreement, default=None)

    def _trace_by_position(
        self, completion_ids: np.ndarray, row: int, num_rows: int
    ) -> TokenSources | None:
        if len(self._emissions) != num_rows or not len(completion_ids):
            return None
        emission = self._emissions[row]
        if common_prefix(emission.token_ids, completion_ids) == 0:
            return None
        sources = _empty_sources(len(completion_ids))
        _copy_emission(sources, emission, completion_ids, 0)
        return replace(sources, context=emission.context, first_emission=row)


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of equal entries before the first difference.

    >>> common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4]))
    2
    """
    size = min(len(one), len(other))
    differing = np.flatnonzero(one[:size] != other[:size])
    return int(differing[0]) if differing.size else size


def _empty_sources(length: int) -> TokenSources:
    return TokenSources(
        emitted=np.zeros(length, np.bool_),
        replaced=np.zeros(length, np.bool_),
        logp=np.full(length, np.nan, np.float32),
    )


def _copy_emission(sources: TokenSources, emission: Emission, rest: np.ndarray, start: int) -> int:
    """Mark the tokens of one emission from `start` on; return their number."""
    num_equal = common_prefix(emission.token_ids, rest)
    size = min(len(emission.token_ids), len(rest))
    if emission.is_ended and num_equal == len(emission.token_ids) - 1:
        size = num_equal  # the end token was cut off before other tokens were appended
    place = slice(start, start + size)
    sources.emitted[place] = True
    sources.replaced[place] = emission.token_ids[:size] != rest[:size]
    if emission.logp is not None:
        sources.logp[start : start + num_equal] = emission.logp[:num_equal]
    return size
