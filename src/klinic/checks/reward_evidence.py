"""Evidence about rewards that is pooled over steps: noise, prompts alone, answers that are paid.

A reward of prompt and completion gives equal completions of one prompt equal rewards, and different
completions of one prompt different ones in some prompts. Pooled steps decide what one step cannot.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from klinic.checks.base import Case
from klinic.checks.measures import equal_completions, tokens_per_row
from klinic.evidence.record import StepRecord

NUM_ERRORS = 3.0  # standard errors: every step of a run is tested, so one in 700 is not rare enough


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardStatistics:
    """Rewards of a step by group; steps are pooled by concatenation."""

    batch: int
    """Hash of completions and rewards: updates on one generation record the same ones again."""
    rewards: np.ndarray
    """The finite rewards of all completions."""
    squares: np.ndarray
    """Per group, the squared deviations of rewards from the mean of their equal completions."""
    repeats: np.ndarray
    """Per group, the completions that repeat an earlier one of it: degrees of freedom."""
    deviating: np.ndarray
    """Per group, the completions with another reward than most of their equals."""
    levels: np.ndarray
    """Per group with at least two different completions, its one reward; NaN for a mixed group."""


def reward_statistics(record: StepRecord) -> RewardStatistics:
    """Return the statistics of a step."""
    equal = equal_completions(record)
    completion = np.zeros(record.num_rows, np.int64)
    for number, rows in enumerate(equal):
        completion[rows] = number
    reward = np.asarray(record.reward, np.float64)
    used = np.isfinite(reward)
    rewards, group, completion = reward[used], record.group[used], completion[used]
    size = np.bincount(completion, minlength=len(equal))
    means = np.bincount(completion, rewards, len(equal)) / np.maximum(size, 1)
    num_groups = int(record.group.max(initial=-1)) + 1
    group_of_completion = np.array([record.group[rows[0]] for rows in equal], np.int64)
    different = np.bincount(group_of_completion[size > 0], minlength=num_groups)
    return RewardStatistics(
        batch=hash((record.token_ids.tobytes(), reward.tobytes())),
        rewards=rewards,
        squares=np.bincount(group, np.square(rewards - means[completion]), num_groups),
        repeats=np.bincount(group, minlength=num_groups) - different,
        deviating=np.bincount(
            group_of_completion,
            size - _commonest_counts(rewards, completion, len(equal)),
            num_groups,
        ),
        levels=_group_levels(rewards, group, num_groups)[different > 1],
    )


def _commonest_counts(rewards: np.ndarray, completion: np.ndarray, num: int) -> np.ndarray:
    """Return for each completion the number of its rows with its commonest reward."""
    rounded = np.round(rewards, 9)
    pairs, counts = np.unique(np.stack([completion, rounded]), axis=1, return_counts=True)
    commonest = np.zeros(num, np.int64)
    np.maximum.at(commonest, pairs[0].astype(np.int64), counts)
    return commonest


def _group_levels(rewards: np.ndarray, group: np.ndarray, num_groups: int) -> np.ndarray:
    """Return the reward that all rows of a group have; NaN if they differ."""
    low, high = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(low, group, rewards)
    np.maximum.at(high, group, rewards)
    return np.where(low == high, low, np.nan)


def recent_statistics(case: Case) -> Collection[RewardStatistics]:
    """Return the statistics of the recent steps with rewards, each generation once."""
    records = [record for record in case.recent_records if record.reward is not None]
    measured = [case.measure_once(reward_statistics, record) for record in records]
    return {step.batch: step for step in measured}.values()


def concatenate_statistics(steps: Collection[RewardStatistics]) -> RewardStatistics:
    """Pool steps."""
    return RewardStatistics(
        batch=0,
        rewards=np.concatenate([step.rewards for step in steps]),
        squares=np.concatenate([step.squares for step in steps]),
        repeats=np.concatenate([step.repeats for step in steps]),
        deviating=np.concatenate([step.deviating for step in steps]),
        levels=np.concatenate([step.levels for step in steps]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardNoise:
    """Variance of the rewards of equal completions, as a fraction of that of all rewards."""

    fraction: float
    error: float
    """Standard error of the fraction."""
    repeats: int
    """Completions that repeat another of their prompt."""
    deviating: float
    """Fraction of them with another reward than most of their equals."""

    @property
    def lower_bound(self) -> float:
        """The fraction less `NUM_ERRORS` standard errors."""
        return self.fraction - NUM_ERRORS * self.error


def measure_noise(pooled: RewardStatistics) -> RewardNoise:
    """Return the noise of pooled rewards; groups are independent, rows of one are not."""
    repeats = int(pooled.repeats.sum())
    spread = float(pooled.rewards.var()) if pooled.rewards.size else 0.0
    if not repeats or spread == 0:
        return RewardNoise(fraction=0.0, error=0.0, repeats=repeats, deviating=0.0)
    variance = float(pooled.squares.sum()) / repeats
    residual = pooled.squares - variance * pooled.repeats
    error = math.sqrt(float(np.square(residual).sum())) / repeats
    return RewardNoise(
        fraction=variance / spread,
        error=error / spread,
        repeats=repeats,
        deviating=float(pooled.deviating.sum()) / repeats,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLevels:
    """Groups of different completions, and how their rewards differ within and between them."""

    num: int
    num_mixed: int
    """Groups with two different rewards."""
    num_others: int
    """Groups whose one reward is not the commonest."""


def count_levels(pooled: RewardStatistics) -> PromptLevels:
    """Count the groups of different completions by their rewards."""
    constant = pooled.levels[~np.isnan(pooled.levels)]
    counts = np.unique(constant, return_counts=True)[1]
    return PromptLevels(
        num=len(pooled.levels),
        num_mixed=len(pooled.levels) - len(constant),
        num_others=len(constant) - int(counts.max(initial=0)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPay:
    """Prompts of which some completions state the dataset's answer and others do not."""

    prompts: int
    paid_more: int
    """Prompts in which a function that reads the answer pays it more than the others."""
    paid_less: int
    """Prompts in which none pays it more, and one pays it less."""


def count_paid_answers(records: Sequence[StepRecord]) -> AnswerPay:
    """Add up the prompts of several steps, from their facts."""

    def total(name: str) -> int:
        return sum(int(record.facts.get(name) or 0) for record in records)

    return AnswerPay(
        prompts=total("answer_prompts"),
        paid_more=total("answer_paid_more"),
        paid_less=total("answer_paid_less"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyPay:
    """The rewards of completions that end at once, beside those of all others."""

    empty: int
    prompts: int
    """Prompts with such a completion."""
    empty_best: int
    """Those of them that get the highest reward of all."""
    others: int
    others_best: int


def count_empty_pay(case: Case) -> EmptyPay | None:
    """Count the completions of the recent steps without a token before the end; None if none."""
    records = [r for r in case.recent_records if r.reward is not None and r.num_rows]
    find_empty = _EmptyRows(eos_ids=tuple(case.run.get("eos_ids") or ()))
    found = [case.measure_once(find_empty, record) for record in records]
    if not any(rows.any() for rows in found):
        return None
    is_empty = np.concatenate(found)
    reward = np.concatenate([np.asarray(record.reward, np.float64) for record in records])
    group = [record.group + (number << 32) for number, record in enumerate(records)]
    finite = np.isfinite(reward)
    is_best = finite & (reward == reward[finite].max(initial=-np.inf))
    return EmptyPay(
        empty=int((is_empty & finite).sum()),
        prompts=len(np.unique(np.concatenate(group)[is_empty & finite])),
        empty_best=int((is_empty & is_best).sum()),
        others=int((~is_empty & finite).sum()),
        others_best=int((~is_empty & is_best).sum()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _EmptyRows:
    """Finds the rows of a step that have no token but end tokens."""

    eos_ids: tuple[int, ...]

    def __call__(self, record: StepRecord) -> np.ndarray:
        ends = tokens_per_row(record, np.isin(record.token_ids, self.eos_ids))
        return np.asarray(ends == np.diff(record.row_offsets))


@dataclass(frozen=True, slots=True, kw_only=True)
class RegradedPay:
    """The rewards of completions with a number as their marked answer, of several steps."""

    right: int
    wrong: int
    right_paid: int
    prompts: int
    """Prompts with two right completions or more."""
    prompts_paid: int
    prompts_unpaid: int
    told_apart: int
    """Prompts whose right completions alone get the highest reward."""
    all_paid: int
    """Prompts whose wrong answers, different from one another, all get it."""


def add_regraded_pay(records: Sequence[StepRecord]) -> RegradedPay:
    """Add up the facts of several steps, each generation once."""
    names = RegradedPay.__dataclass_fields__
    facts = {record.token_ids.tobytes(): record.facts for record in records if _is_regraded(record)}
    return RegradedPay(
        **{
            name: sum(int(of_step.get(f"regraded_{name}") or 0) for of_step in facts.values())
            for name in names
        }
    )


def _is_regraded(record: StepRecord) -> bool:
    return record.facts.get("regraded_right") is not None
