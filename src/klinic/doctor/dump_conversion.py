"""Converts the batch dump or scalar log of another trainer to a run folder of klinic's format."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from klinic.doctor.dump_diagnosis import DumpContents, dump_cases
from klinic.errors import ConfigError, EvidenceError
from klinic.evidence.files import json_bytes
from klinic.evidence.metrics import logged_metrics
from klinic.evidence.readers.dumps.token_dump import TokenDump
from klinic.evidence.readers.log import ScalarLog
from klinic.evidence.record import StepRecord
from klinic.evidence.run_facts import METRICS, MOST_TOKENS, write_run_facts, write_tokens
from klinic.evidence.store import write_record
from klinic.evidence.writing import remove_tree, write_atomically

PER_CHARACTER = ("completions/", "num_tokens")
"""Metrics that count tokens: a dump of texts has characters in their place."""

Progress = Callable[[int, int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedRun:
    """What was written."""

    run: Path
    contents: DumpContents
    metric_steps: list[int]
    """The steps of metrics.jsonl."""
    metric_names: list[str]


def convert_run(
    dump: TokenDump | None, log: ScalarLog | None, out: Path, progress: Progress
) -> ConvertedRun:
    """Write a dump, its scalar log, or both as a run folder, one step in memory at a time.

    A folder that could not be completed is removed.
    """
    _refuse_existing(out)
    is_new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        return _write_run(dump, log, out, progress)
    except BaseException:
        if is_new:
            remove_tree(out)
        raise


def _refuse_existing(out: Path) -> None:
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ConfigError(f"{out} exists and is not an empty folder. Name a new folder.")


def _write_run(
    dump: TokenDump | None, log: ScalarLog | None, out: Path, progress: Progress
) -> ConvertedRun:
    trainer = (
        {} if log is None or not log.trainer.recognised else {"trainer": log.trainer.name.lower()}
    )
    contents = DumpContents(facts=trainer if dump is None else dict(dump.facts))
    metrics = _logged_by_step(log)
    if dump is not None:
        texts: set[int] = set()
        write_run_facts(out, contents.facts)
        with np.errstate(all="ignore"):  # a dump may hold any value
            for case in dump_cases(dump, log, contents):
                write_record(out, case.record)
                computed = _record_metrics(case.record, dump)
                metrics[case.record.step] = metrics.get(case.record.step, {}) | computed
                texts |= _character_codes(case.record) if dump.has_texts_only else set()
                progress(len(contents.steps), max(dump.num_files, len(contents.steps)))
        if not contents.steps:
            raise EvidenceError(
                f"{dump.path}: has no completions. Pass a folder of a run that has."
            )
        if texts:
            write_tokens(out, {code: chr(code) for code in sorted(texts)[:MOST_TOKENS]})
    write_run_facts(out, contents.facts)  # with the advantage estimator, if one fits
    lines = [json_bytes({"step": step, **metrics[step]}) + b"\n" for step in sorted(metrics)]
    write_atomically(out / METRICS, b"".join(lines))
    return ConvertedRun(
        run=out,
        contents=contents,
        metric_steps=sorted(metrics),
        metric_names=sorted({name for line in metrics.values() for name in line}),
    )


def _logged_by_step(log: ScalarLog | None) -> dict[int, dict[str, Any]]:
    """Return the logged metrics by step."""
    if log is None:
        return {}
    return {
        step: {n: column[i] for n, column in log.columns.items() if column[i] is not None}
        for i, step in enumerate(log.steps)
    }


def _record_metrics(record: StepRecord, dump: TokenDump) -> dict[str, float]:
    computed = logged_metrics(record, kl_coef=None)
    skipped = PER_CHARACTER if dump.has_texts_only else ()
    return {
        name: value
        for name, value in computed.items()
        if math.isfinite(value) and not name.startswith(skipped)
    }


def _character_codes(record: StepRecord) -> set[int]:
    prompts = np.zeros(0, np.int64) if record.prompt_ids is None else record.prompt_ids
    return set(np.unique(np.concatenate([record.token_ids, prompts])).tolist())
