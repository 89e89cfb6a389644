"""Joins what the processes of a TRL run captured in a step, on rank 0."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from klinic.evidence.processes import Processes, ProcessRows, gather_rows, join_records
from klinic.evidence.record import ProbeResult, StepRecord

ProbeResults = Mapping[str, ProbeResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedStep:
    """A step of all processes."""

    record: StepRecord
    probe_results: ProbeResults
    num_parsed: int
    """Completions with a parsable answer."""
    num_to_parse: int
    """Completions that were parsed; 0 if answers are not."""
    weights_finite: bool


def join_step(
    processes: Processes,
    own: StepRecord,
    *,
    probe_results: ProbeResults | None = None,
    parsed: tuple[int, int] = (0, 0),
    weights_finite: bool = True,
) -> JoinedStep | None:
    """Return the step of all processes on rank 0, None on the others; all must call this."""
    values = {"probes": probe_results or {}, "parsed": parsed, "finite": weights_finite}
    parts = gather_rows(processes, ProcessRows(record=own, values=values))
    if not parts:
        return None
    record = join_records([part.record for part in parts])
    if processes.size > 1:
        record = replace(record, facts={**record.facts, **_weight_facts(parts)})
    return JoinedStep(
        record=record,
        probe_results=worst_results([part.values["probes"] for part in parts]),
        num_parsed=sum(part.values["parsed"][0] for part in parts),
        num_to_parse=sum(part.values["parsed"][1] for part in parts),
        weights_finite=all(part.values["finite"] for part in parts),
    )


def worst_results(by_rank: Sequence[ProbeResults]) -> dict[str, ProbeResult]:
    """Return for each probe the result of the process that is farthest from the expected one.

    >>> worst_results([{"rescore": {"largest": 0.0}}, {"rescore": {"largest": 0.5}}])
    {'rescore': {'largest': 0.5, 'process': 1}}
    """
    if len(by_rank) == 1:
        return dict(by_rank[0])
    results: dict[str, ProbeResult] = {}
    for name in dict.fromkeys(name for part in by_rank for name in part):
        ranks = [rank for rank, part in enumerate(by_rank) if name in part]
        worst = max(ranks, key=lambda rank: _deviation(by_rank[rank][name]))
        results[name] = {**by_rank[worst][name], "process": worst}
    return results


def _deviation(result: ProbeResult) -> float:
    """Return how far the result of a probe is from that of a healthy process."""
    if "largest" in result:
        return _number(result["largest"], 0.0)
    ratio, cosine = _number(result.get("ratio"), 1.0), _number(result.get("cosine"), 1.0)
    return abs(ratio - 1.0) + abs(cosine - 1.0)


def _number(value: Any, default: float) -> float:
    return default if value is None else float(value)


def _weight_facts(parts: Sequence[ProcessRows]) -> dict[str, int]:
    """Return the number of different weights that the processes generated with, if known."""
    fingerprints = [part.record.facts.get("weights_published") for part in parts]
    if any(fingerprint is None for fingerprint in fingerprints):
        return {}
    return {"num_rank_weights": len(set(fingerprints))}
