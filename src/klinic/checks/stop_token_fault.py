"""stop-token-fault: the end of a completion is masked, missed or trained past."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
)
from klinic.checks.measures import row_numbers
from klinic.checks.run_on_texts import MAX_ENDED_FRACTION, MIN_RUN_ON_FRACTION, find_run_on_texts
from klinic.evidence.record import EmittedBy, StepRecord

MIN_STOPPED_ROWS = 8  # rows that ended on their own
MAX_MASKED_FRACTION = 0.5  # max fraction of their last tokens that are not trained on
MAX_MISSED_FRACTION = (
    0.0  # fraction of rows that continue after an end token, or are truncated at one
)
MAX_MISSED_IN_CHATS = 0.05  # fraction of rows with turns that continue after an end token
MIN_ENDED_PROMPTS = 0.9  # fraction of prompts that end with an end token
MAX_IGNORED_FRACTION = (
    0.1  # fraction of rows that continue after an end token of the model's files only
)


def judge_case(case: Case) -> Finding:
    """Flag ends of completions that the policy cannot learn from.

    Looks for
        Rows and turns that ended on their own and whose end token is not trained on; rows that
        continue after an end token; rows that end with one and are marked as truncated; and rows
        that continue after a token that is an end token in the model's generation config and not
        in the trainer, as with models that have a separate end-of-turn token. Rows that continue
        after a token whose text is that of an end token, where no row has the trainer's: the model
        never learned that one. And prompts that
        end with an end token, after which the model continues a text that is over. In texts:
        completions that run on into turns of the user that the policy invents, such as "User:".
    Why it matters
        A policy that gets no signal for ending learns to ramble into the length limit, and its
        rewards then measure that limit.
    Confirmed when
        Half of the ends of rows, or of the ends of turns within rows, are not trained on, or a
        single row continues after an end token (one in twenty, if an environment replies within
        rows) or is marked as truncated at one, or one in ten continues after one that the trainer
        does not use, or whose text alone is that of one, or nine in ten prompts end with one. In
        texts:
        half of the completions have a turn of the user, without a tool, and half of those end in
        the middle of something, unlike their first turns.
    Ruled out when
        End tokens are trained on, and end their rows.
    Confused with
        wrong-loss-mask (tokens inside rows are left out); context-truncated (rows are truncated
        before any end).
    """
    record = case.record
    assert record.finish_reason is not None  # noqa: S101 - needed
    if (finding := _judge_end_tokens(record, case.run)) is not None:
        return replace(finding, excludes=("retokenised",))  # which spares some rows
    has_tokens = np.diff(record.row_offsets) > 0
    last = (record.row_offsets[1:] - 1)[has_tokens]
    reason = record.finish_reason[has_tokens]
    is_end = np.isin(record.token_ids, np.asarray(case.run["eos_ids"]))
    stopped = reason == "stop"
    inner_ends = is_end & ~_is_answered(record)
    inner_ends[last] = False
    inner_ends &= ~_rare_in_chats(record, inner_ends)
    num_missed = int(inner_ends.sum()) + int((is_end[last] & (reason == "length")).sum())
    row_ends = last[stopped]
    turn_ends = np.setdiff1d(np.flatnonzero(is_end & _is_answered(record)), last)
    num_ends = row_ends.size + turn_ends.size
    if num_ends < MIN_STOPPED_ROWS and not num_missed:
        return no_data_finding(
            f"{num_ends} rows and turns ended on their own, {MIN_STOPPED_ROWS} needed"
        )
    kind, masked_fraction = _most_masked_ends(record, row_ends, turn_ends)
    missed_fraction = num_missed / max(len(last), 1)
    summary = (
        f"{masked_fraction:.0%} of the end tokens{kind} are not trained on (limit "
        f"{MAX_MASKED_FRACTION:.0%}), and {num_missed} of "
        f"{len(last)} rows continue after one or are truncated at one (limit 0)"
    )
    wrong = masked_fraction > MAX_MASKED_FRACTION or missed_fraction > MAX_MISSED_FRACTION
    return (failed_finding if wrong else passed_finding)(
        summary, masked=masked_fraction, missed=missed_fraction
    )


def _judge_end_tokens(record: StepRecord, run: Mapping[str, Any]) -> Finding | None:
    """Return a finding if the trainer's end tokens are not those of model and prompts."""
    ignored_fraction = _ignored_end_fraction(record, run)
    if ignored_fraction > MAX_IGNORED_FRACTION:
        return failed_finding(
            f"{ignored_fraction:.0%} of the rows continue after "
            "an end token of the model's generation "
            f"config that the trainer does not use (limit {MAX_IGNORED_FRACTION:.0%})",
            ignored=ignored_fraction,
        )
    unlearned_fraction = _unlearned_end_fraction(record, run)
    if unlearned_fraction > MAX_IGNORED_FRACTION:
        return failed_finding(
            f"no row has an end token of the trainer, and {unlearned_fraction:.0%} continue after "
            f"a token whose text is that of one (limit {MAX_IGNORED_FRACTION:.0%}): the model has "
            "learned to end with that",
            unlearned=unlearned_fraction,
        )
    ended_prompts = _ended_prompt_fraction(record, run["eos_ids"])
    if ended_prompts >= MIN_ENDED_PROMPTS:
        return failed_finding(
            f"{ended_prompts:.0%} of the prompts end with an end token (limit "
            f"{MIN_ENDED_PROMPTS:.0%}): the tokenizer appends it, or the chat template opens no "
            "answer",
            prompts=ended_prompts,
        )
    return None


def _most_masked_ends(
    record: StepRecord, row_ends: np.ndarray, turn_ends: np.ndarray
) -> tuple[str, float]:
    """Return which end tokens are masked most often, and the fraction of them that is.

    Masked ends of rows are rare among all ends where each row has several turns.
    """
    kinds = {" of rows": row_ends, " of turns": turn_ends}
    enough = {kind: ends for kind, ends in kinds.items() if ends.size >= MIN_STOPPED_ROWS}
    if len(enough) < len(kinds):  # too few of one kind to be judged alone
        enough = {"": np.concatenate([row_ends, turn_ends])}
    masked = {
        kind: float((~record.loss_mask[ends]).mean()) if ends.size else 0.0
        for kind, ends in enough.items()
    }
    most = max(masked, key=lambda kind: masked[kind])
    return most, masked[most]


def confirm_run_on_texts(case: Case) -> Finding | None:
    """Confirm the cause from texts alone."""
    found = find_run_on_texts(case)
    if found is None:
        return None
    return failed_finding(
        f"{found.fraction:.0%} of the completions run on into a turn of the user (limit "
        f"{MIN_RUN_ON_FRACTION:.0%}), and {found.ended / found.with_turn:.0%} of these end as "
        f"their first turns do (limit {MAX_ENDED_FRACTION:.0%}): no end token stops them",
        run_on=found.fraction,
    )


def _ended_prompt_fraction(record: StepRecord, eos_ids: list[int]) -> float:
    """Return the fraction of prompts that end with an end token, as no prompt of one token does.

    The token that starts a text is an end token of some models, and may be a whole prompt.
    """
    if record.prompt_ids is None or record.prompt_offsets is None:
        return 0.0
    ends = record.prompt_offsets[1:][np.diff(record.prompt_offsets) > 1]
    is_end = np.isin(record.prompt_ids[ends - 1], np.asarray(eos_ids))
    return float(is_end.mean()) if is_end.size else 0.0


def _is_answered(record: StepRecord) -> np.ndarray:
    """Return whether the next token is one of an environment, outside the loss: a turn ended."""
    answered = np.zeros(len(record.token_ids), dtype=bool)
    if record.emitted_by is not None:
        answered[:-1] = (record.emitted_by[1:] != EmittedBy.POLICY) & ~record.loss_mask[1:]
    return answered


def _rare_in_chats(record: StepRecord, inner_ends: np.ndarray) -> np.ndarray:
    """Return the inner ends of rows with turns, if few rows have one.

    A token that ends a turn before an environment replies may be a plain one in another turn.
    """
    if record.emitted_by is None:
        return np.zeros(len(inner_ends), dtype=bool)
    row = row_numbers(record)
    has_turns = np.isin(row, row[record.emitted_by != EmittedBy.POLICY])
    goes_on = np.append(record.emitted_by[1:] == EmittedBy.POLICY, False)
    in_chats = inner_ends & has_turns & goes_on
    is_rare = len(np.unique(row[in_chats])) <= MAX_MISSED_IN_CHATS * record.num_rows
    return in_chats if is_rare else np.zeros(len(inner_ends), dtype=bool)


def _ignored_end_fraction(record: StepRecord, run: Mapping[str, Any]) -> float:
    """Return the fraction of rows in which the policy continues after an unused end token."""
    return _continued_fraction(record, set(run.get("declared_eos_ids") or ()) - set(run["eos_ids"]))


def _unlearned_end_fraction(record: StepRecord, run: Mapping[str, Any]) -> float:
    """Return the same for tokens with the text of an end token; 0 if a row has a used one."""
    if np.isin(record.token_ids, np.asarray(run["eos_ids"])).any():
        return 0.0
    return _continued_fraction(record, set(run.get("end_like_ids") or ()))


def _continued_fraction(record: StepRecord, ends: set[int]) -> float:
    """Return the fraction of rows in which the policy continues after one of these tokens."""
    if not ends:
        return 0.0
    row = row_numbers(record)
    continues = np.isin(record.token_ids[:-1], list(ends)) & (row[1:] == row[:-1])
    if record.emitted_by is not None:  # a tool may reply after a turn ended
        continues &= record.emitted_by[1:] == EmittedBy.POLICY
    return len(set(row[:-1][continues].tolist())) / record.num_rows


CHECK = Check(
    name="stop-token-fault",
    description="the end of a completion is masked, missed or trained past",
    stage=Stage.ALIGNMENT,
    needs=("record.finish_reason", "run.eos_ids"),
    fix="Append no end token to prompts (add_special_tokens, add_generation_prompt). Derive masks "
    "and ends from lengths and finish reasons, not from token values, and use every end token of "
    "the model: the one that it was trained to emit, not a new one.",
    judge=judge_case,
    confirm=confirm_run_on_texts,
    explains=(
        "context-truncated",
        "hidden-sampling-transform",
        "imprecise-logp",
        "unexplained-gap",
        "equal-rewards",
    ),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.token_ids",
        "record.prompt_ids",
        "record.prompt_offsets",
        "run.pad_id",
        "run.declared_eos_ids",
        "run.end_like_ids",
        "run.sampling",
        "run.token_ids",
    ),
)
