"""Reads the scalar log of any trainer as a report: curves, verdict on scalars, no tokens."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from klinic.doctor.scalars.check import ScalarCheck
from klinic.doctor.scalars.examine import ScalarDiagnosis, examine_log
from klinic.doctor.scalars.sentences import headline_text
from klinic.evidence.readers.find import NO_NAMES, read_log
from klinic.evidence.readers.log import ScalarLog
from klinic.evidence.verdict import Verdict
from klinic.report.curves import PLOTTED_METRICS, MetricCurves
from klinic.report.evidence_picture import EvidencePicture, choose_picture
from klinic.report.reading import EventLog, RunReport
from klinic.report.run_header import run_header
from klinic.report.verdict_card import card_of_scalars

MAX_FURTHER = 12  # curves beside the usual ones


def read_log_report(path: Path, names: Mapping[str, str] = NO_NAMES) -> RunReport:
    """Return the report of a scalar log; raise if there is none at the path.

    `names` maps metrics to their names in the log, where klinic does not know them.
    """
    log = read_log(path, names)
    diagnosis = examine_log(log)
    plotted = dict.fromkeys((*PLOTTED_METRICS, *_further_metrics(log)))
    curves = MetricCurves(_iter_entries(log), plotted)
    card = card_of_scalars(diagnosis)
    return RunReport(
        name=str(path),
        sentence=headline_text(diagnosis),
        header=[("Log", log.format), *run_header(_log_facts(log), curves, log.steps)],
        recipe="",
        card=card,
        picture=_choose_log_picture(diagnosis, curves),
        curves=curves,
        events=EventLog(),
        marks=[],
    )


def _iter_entries(log: ScalarLog) -> Iterator[dict[str, Any]]:
    for index, step in enumerate(log.steps):
        values = {name: column[index] for name, column in log.columns.items()}
        yield {"step": step, **{name: value for name, value in values.items() if value is not None}}


def _further_metrics(log: ScalarLog) -> list[str]:
    rest = [n for n in log.columns if n not in PLOTTED_METRICS and not n.startswith("rewards/")]
    return rest[:MAX_FURTHER]


def _log_facts(log: ScalarLog) -> dict[str, Any]:
    return {"trainer": log.trainer.name} if log.trainer.recognised else {}


def _choose_log_picture(diagnosis: ScalarDiagnosis, curves: MetricCurves) -> EvidencePicture | None:
    """Return the column that the first failed sign reads."""
    failed = diagnosis.with_verdict(Verdict.FAIL)
    if not failed:
        return None
    sign, finding = failed[0]
    cause = diagnosis.causes[0].name if diagnosis.causes else ""
    return choose_picture(cause, finding.step, curves.names, prefer=_columns_of(sign))


def _columns_of(sign: ScalarCheck) -> tuple[str, ...]:
    return tuple(name for need in sign.needs for name in need.split("|"))
