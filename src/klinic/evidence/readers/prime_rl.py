"""Reads prime-rl's token export (`enable_token_export`): token_exports/step_N/rank_R.jsonl.

A line is a sequence: prompt and completion concatenated, with a list per column. Position t holds
the log-prob of token t, as in `StepRecord`. The tokens before the first trained one are the prompt;
sequences of a step with the same prompt form a group. The trainer scores once per step, before its
update, so `trainer_logprobs` are both `logp` and `logp_old`. Rewards and reference log-probs are
not exported.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from klinic.errors import EvidenceError
from klinic.evidence.files import LONGEST, Journal
from klinic.evidence.readers.prime_rl_files import rank_files, step_folders
from klinic.evidence.record import StepRecord
from klinic.evidence.run_facts import SHARED_FORWARD

SCHEMA = 1
RUN_FACTS = {"logp_old": SHARED_FORWARD}
"""The run.json keys of such a run."""
FLOAT_COLUMNS = ("advantages", "inference_logprobs", "trainer_logprobs", "entropy")
ADVICE = "It was cut short or edited; restore it from a copy, or remove the step's folder"


def read_records(folder: Path) -> Iterator[StepRecord]:
    """Yield the record of every step, in order."""
    for step, child in step_folders(folder):
        rows = [
            _parse_sequence(entry, path, n)
            for path in rank_files(child)
            for n, entry in _numbered_entries(path)
        ]
        if rows:
            yield _build_record(step, rows)


def _numbered_entries(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    return enumerate(Journal(path, longest=LONGEST).entries(), 1)


def _parse_sequence(entry: dict[str, Any], path: Path, line: int) -> dict[str, Any]:
    """Return the columns of a line as arrays over its tokens."""
    where = f"{path}, line {line}"
    if entry.get("schema_version") != SCHEMA:
        raise EvidenceError(
            f"{where}: has schema {str(entry.get('schema_version'))[:20]}, and klinic reads "
            f"{SCHEMA}. Export with a version of prime-rl that writes it."
        )
    columns = {"token_ids": _int_array(entry, "token_ids", where)}
    columns["loss_mask"] = _int_array(entry, "loss_mask", where) != 0
    for name in FLOAT_COLUMNS:
        columns[name] = _float_array(entry, name, where)
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1 or not columns["loss_mask"].any():
        raise EvidenceError(
            f"{where}: columns have {lengths} entries; they must be equally long, with at least "
            f"one trained token. {ADVICE}."
        )
    return columns


def _number_list(entry: dict[str, Any], name: str, where: str) -> list[Any]:
    values = entry.get(name)
    kinds = (int, float, type(None))
    if not isinstance(values, list) or not all(isinstance(value, kinds) for value in values):
        raise EvidenceError(f"{where}: `{name}` is not a list of numbers. {ADVICE}.")
    return values


def _int_array(entry: dict[str, Any], name: str, where: str) -> Any:
    values = _number_list(entry, name, where)
    try:
        return np.array([int(value) for value in values], np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise EvidenceError(f"{where}: `{name}` has an invalid id ({error}). {ADVICE}.") from error


def _float_array(entry: dict[str, Any], name: str, where: str) -> Any:
    values = _number_list(entry, name, where)
    try:
        return np.array([np.nan if value is None else float(value) for value in values])
    except OverflowError as error:
        raise EvidenceError(f"{where}: `{name}` has {error}. {ADVICE}.") from error


def _build_record(step: int, rows: list[dict[str, Any]]) -> StepRecord:
    starts = [int(np.argmax(row["loss_mask"])) for row in rows]
    prompts = [row["token_ids"][:start] for row, start in zip(rows, starts, strict=True)]
    group_of_prompt = {
        prompt.tobytes(): index for index, prompt in reversed(list(enumerate(prompts)))
    }

    def completion_column(name: str) -> Any:
        """Return a column of all completions, concatenated."""
        return np.concatenate([row[name][s:] for row, s in zip(rows, starts, strict=True)])

    sizes = [len(row["token_ids"]) - start for row, start in zip(rows, starts, strict=True)]
    return StepRecord(
        step=step,
        group=np.array([group_of_prompt[prompt.tobytes()] for prompt in prompts], np.int64),
        row_offsets=np.cumsum([0, *sizes], dtype=np.int64),
        prompt_offsets=np.cumsum([0, *starts], dtype=np.int64),
        prompt_ids=np.concatenate(prompts),
        token_ids=completion_column("token_ids"),
        loss_mask=completion_column("loss_mask"),
        advantage=np.array([row["advantages"][s] for row, s in zip(rows, starts, strict=True)]),
        logp_sampler=completion_column("inference_logprobs"),
        logp=completion_column("trainer_logprobs"),
        entropy=completion_column("entropy"),
        facts={"learner_version": step - 1} if step else {},
    )
