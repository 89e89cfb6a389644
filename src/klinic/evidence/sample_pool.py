"""The samples of a generation, to which trained rows are joined by their token ids."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from klinic.evidence.record import EmittedBy
from klinic.evidence.row_join import UNMATCHED, Emission, EmissionIndex, match_rows, row_key


@dataclass(slots=True)
class SamplePool:
    """The sampled rows of one generation."""

    emissions: list[Emission] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)
    """None: that of the learner when the row was sampled."""
    num_steps: list[int] = field(default_factory=list)
    """Steps recorded before the row was sampled."""
    rewards: list[float] = field(default_factory=list)
    """Empty if no rewards were given with the samples."""
    groups: list[int] = field(default_factory=list)
    """Empty if no groups were given with the samples."""
    keys: list[bytes] = field(default_factory=list)
    """Of the ids of each row."""
    num_used: int = 0
    """Rows that were trained on since: the place of the next one."""
    num_updates: int = 0
    """Updates on these rows while they were the newest."""

    @property
    def contexts(self) -> set[bytes]:
        """The prompts, as bytes."""
        return {_context(row).tobytes() for row in self.emissions}

    def weight_versions(self, shift: int) -> np.ndarray:
        """Return the weight version of each row; the learner's is `shift` above its step."""
        pairs = zip(self.versions, self.num_steps, strict=True)
        return np.array([num + shift if v is None else v for v, num in pairs], np.int64)

    def add_rows(
        self,
        emissions: Sequence[Emission],
        *,
        version: int | None,
        num_steps: int,
        rewards: Sequence[float] | None,
        groups: Sequence[int] | None,
    ) -> None:
        """Add sampled rows."""
        self.emissions += emissions
        self.keys += [row_key(_context(row), row.token_ids) for row in emissions]
        self.versions += [version] * len(emissions)
        self.num_steps += [num_steps] * len(emissions)
        self.rewards += rewards or ()
        self.groups += groups or ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JoinedSamples:
    """The samples of a batch of trained rows; token arrays are concatenated."""

    emitted_by: np.ndarray
    logp_sampler: np.ndarray | None
    weight_version: np.ndarray
    reward: np.ndarray | None
    group: np.ndarray | None
    prompt_ids_match: np.ndarray
    is_reencoded: np.ndarray
    """True for rows whose ids were changed as decoding and encoding does."""
    num_moved: int
    num_changed: int
    num_sampled: int
    """Rows of the generation."""


def join_samples(
    pool: SamplePool,
    prompts: Sequence[np.ndarray],
    completions: Sequence[np.ndarray],
    advantage: np.ndarray | None,
    *,
    version_shift: int,
) -> JoinedSamples:
    """Return what was sampled for each trained row, by its ids.

    `version_shift` is the learner's version less the number of steps recorded before this one.
    """
    trained = [row_key(*row) for row in zip(prompts, completions, strict=True)]
    places = [(pool.num_used + row) % len(pool.keys) for row in range(len(trained))]
    numbers = match_rows(
        trained,
        pool.keys,
        expected=places,
        trained_order=None if advantage is None else advantage.tolist(),
        sampled_order=pool.rewards if pool.rewards and advantage is not None else None,
    )
    pool.num_used += len(trained)
    index = EmissionIndex(pool.emissions)
    taken = frozenset(numbers.tolist())
    joined = [
        _join_row(pool, index, number, ids, place, taken)
        for number, place, *ids in zip(numbers.tolist(), places, prompts, completions, strict=True)
    ]
    known = numbers != UNMATCHED
    picked = np.array([row.number for row in joined])
    has_sample = picked != UNMATCHED
    lengths = [len(ids) for ids in completions]
    logp = np.concatenate([row.logp for row in joined])
    return JoinedSamples(
        emitted_by=np.concatenate([row.emitted_by for row in joined]),
        logp_sampler=logp if any(e.logp is not None for e in pool.emissions) else None,
        weight_version=np.repeat(pool.weight_versions(version_shift)[picked], lengths),
        reward=np.where(has_sample, np.array(pool.rewards)[picked], np.nan)
        if pool.rewards
        else None,
        group=np.array(pool.groups, np.int64)[picked] if pool.groups else None,
        prompt_ids_match=np.array([row.is_same_prompt for row in joined], np.bool_),
        is_reencoded=_reencoded_rows(joined),
        num_moved=int((known & (numbers != np.array(places))).sum()),
        num_changed=int((~known).sum()),
        num_sampled=len(pool.emissions),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _JoinedRow:
    number: int
    emitted_by: np.ndarray
    logp: np.ndarray
    is_same_prompt: bool
    is_replaced: bool = False
    is_reencoded: bool = False


def _reencoded_rows(rows: Sequence[_JoinedRow]) -> np.ndarray:
    """Return which rows were decoded and encoded again.

    A row that an environment wrote over may end in the sampled token by chance, so most of the
    rows with replaced ids must look like it.
    """
    is_reencoded = np.array([row.is_reencoded for row in rows], np.bool_)
    num_replaced = sum(row.is_replaced for row in rows)
    return np.asarray(is_reencoded & (2 * is_reencoded.sum() > num_replaced))


def _join_row(
    pool: SamplePool,
    index: EmissionIndex,
    number: int,
    ids: Sequence[np.ndarray],
    place: int,
    taken: frozenset[int],
) -> _JoinedRow:
    prompt, completion = ids
    if number != UNMATCHED:
        logp = pool.emissions[number].logp
        return _JoinedRow(
            number=number,
            emitted_by=np.full(len(completion), EmittedBy.POLICY, np.int8),
            logp=np.full(len(completion), np.nan, np.float32) if logp is None else logp,
            is_same_prompt=True,
        )
    sources = index.trace_tokens(
        prompt, completion, row=place, num_rows=len(pool.emissions), taken=taken
    )
    if sources is None:  # nobody sampled any of it
        return _JoinedRow(
            number=UNMATCHED,
            emitted_by=np.full(len(completion), EmittedBy.TOOL, np.int8),
            logp=np.full(len(completion), np.nan, np.float32),
            is_same_prompt=True,
        )
    emitters = np.where(sources.emitted, EmittedBy.POLICY, EmittedBy.TOOL).astype(np.int8)
    return _JoinedRow(
        number=sources.first_emission,
        emitted_by=emitters,
        logp=sources.logp,
        is_same_prompt=not sources.is_elsewhere
        and sources.context is not None
        and np.array_equal(sources.context, prompt),
        is_replaced=bool(sources.replaced.any()),
        is_reencoded=sources.is_reencoded,
    )


def _context(emission: Emission) -> np.ndarray:
    return np.zeros(0, np.int64) if emission.context is None else emission.context


def group_by_prompt(group: np.ndarray, prompts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the groups numbered from 0; by prompt where the given ones mix as many prompts.

    Groups that mix prompts are a fault, which a check finds if rows of one prompt are together.
    Rows may have prompts of their own: then there are more prompts than groups.

    >>> prompts = [np.array([n]) for n in (7, 8, 7, 8)]
    >>> group_by_prompt(np.array([0, 0, 1, 1]), prompts).tolist()
    [0, 1, 0, 1]
    >>> group_by_prompt(np.array([5, 9, 5, 9]), prompts).tolist()
    [0, 1, 0, 1]
    """
    keys = [prompt.tobytes() for prompt in prompts]
    number = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    by_prompt = np.array([number[key] for key in keys], np.int64)
    given = np.unique(group, return_inverse=True)[1].astype(np.int64)
    pairs = {*zip(given.tolist(), by_prompt.tolist(), strict=True)}
    is_mixed = len(pairs) > len(set(given.tolist()))
    return by_prompt if is_mixed and len(number) <= len(set(given.tolist())) else given
