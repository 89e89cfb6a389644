"""wrong-tokenizer: the teacher reads the policy's token ids as other tokens."""

import math

import numpy as np

from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
    warning_finding,
)
from klinic.checks.measures import finite_trained_tokens, float64_column, row_numbers
from klinic.evidence.record import StepRecord

MARGIN = 1.0  # nats below a uniform guess; an untrained model of width 128 is 0.2 below
SURE = 0.5  # of the entropy of a uniform guess: a policy below it has learned its tokens
MIN_TOKENS = 50  # tokens


def judge_case(case: Case) -> Finding:
    """Flag a teacher to which the policy's completions are less likely than random tokens.

    Looks for
        The teacher's mean log-prob of the trained tokens, against a uniform guess over the
        vocabulary, on all completions and on those with the best reward.
    Why it matters
        A teacher with another tokenizer reads other text than the policy wrote. Its log-probs are
        finite and negative, the KL falls as the policy follows them, and the policy unlearns.
    Confirmed when
        The mean is 1 nat below a uniform guess, also on the completions with the best reward of
        the step, while the policy is sure of them; without rewards that differ, only a warning.
    Ruled out when
        The teacher gives the completions, or the best of them, more than a uniform guess would.
    Confused with
        stale-teacher-prompts (the teacher scored again gives other log-probs); swapped-teacher
        (its weights changed); a teacher that was never trained on the task.
    """
    uniform = -math.log(float(case.run["vocabulary_size"]))
    record = case.record
    tokens = finite_trained_tokens(record, "logp_teacher", "logp_old")
    if tokens.sum() < MIN_TOKENS:
        return no_data_finding(f"fewer than {MIN_TOKENS} trained tokens have a teacher's log-prob")
    of_teacher = float64_column(record, "logp_teacher")
    mean, of_policy = (
        float(values[tokens].mean()) for values in (of_teacher, float64_column(record, "logp_old"))
    )
    limit = uniform - MARGIN
    summary = (
        f"the teacher gives a trained token {mean:.3g} nats on average (limit {limit:.3g}: a "
        f"uniform guess gives {uniform:.3g}), the policy {of_policy:.3g}"
    )
    figures = {"logp_teacher": mean, "uniform": uniform}
    if mean > limit:
        return passed_finding(summary, **figures)
    if of_policy < SURE * uniform:
        return no_data_finding(f"{summary}: the policy is not sure of them either")
    best = tokens & _best_rewarded(record)
    if not best.any():
        return warning_finding(f"{summary}; no reward tells a good completion", **figures)
    on_best = float(of_teacher[best].mean())
    if on_best > limit:
        return passed_finding(f"{summary}; those with the best reward {on_best:.3g}", **figures)
    return failed_finding(f"{summary}; those with the best reward {on_best:.3g}", **figures)


def _best_rewarded(record: StepRecord) -> np.ndarray:
    """Return the tokens of completions with the step's best reward, none if all are equal."""
    rewards = record.reward
    if rewards is None or not np.isfinite(rewards).any():
        return np.zeros(record.num_tokens, bool)
    if np.nanmax(rewards) == np.nanmin(rewards):
        return np.zeros(record.num_tokens, bool)
    best: np.ndarray = (rewards == np.nanmax(rewards))[row_numbers(record)]
    return best


CHECK = Check(
    name="wrong-tokenizer",
    description="the teacher reads the policy's token ids as other tokens",
    stage=Stage.REFERENCE,
    needs=("record.logp_teacher", "record.logp_old", "run.vocabulary_size"),
    fix="Use a teacher whose tokenizer gives every token the same id as the policy's, and compare "
    "the two vocabularies before training.",
    judge=judge_case,
    is_of_setup=True,
    reads=("record.loss_mask", "record.reward", "record.row_offsets", "run.teacher"),
)
