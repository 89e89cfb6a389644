"""Sentences on the diagnosis of a scalar log: the verdict, what was read, and what was not."""

from collections.abc import Sequence

from klinic.doctor.scalars.examine import CORE_METRICS, ScalarDiagnosis
from klinic.evidence.readers.log import ScalarLog
from klinic.evidence.readers.trainer import TRAIN_PREFIX
from klinic.evidence.verdict import RunVerdict, Verdict

SCALARS_ONLY = (
    "Scalars only: step means show that something is wrong, but seldom the cause. Causes with "
    "the same scalars are listed together."
)
CORE_NAME_PARTS = (
    *(("KL", "kl", "kl"), ("reward", "reward", "reward"), ("reward", "reward", "score")),
    *(("sampler gap", "sampler/gap", "gap"), ("sampler gap", "sampler/gap", "logp")),
)
"""Topic, klinic's metric, and a part of names that it may have in a log."""
MAX_NAMED = 8  # unread metrics named in a sentence
LIKELY_NAME_PARTS = ("kl", "reward", "score", "logp", "prob")  # substrings of names listed first


def source_lines(diagnosis: ScalarDiagnosis) -> list[str]:
    """Return where the scalars come from, and what they can show."""
    log = diagnosis.log
    steps = f"{len(log.steps)} logged steps, {log.steps[0]} to {log.steps[-1]}"
    writer = f"of {log.trainer.name}" if log.trainer.recognised else "(trainer not recognised)"
    lines = [f"{log.format} {writer}, {steps}: {log.files[0]}", SCALARS_ONLY]
    if log.also:
        lines.append(f"Present but not read: {', '.join(log.also)}")
    if log.num_skipped:
        lines.append(f"{log.num_skipped} values or lines were not numeric and were skipped.")
    return lines


def coverage_lines(diagnosis: ScalarDiagnosis) -> list[str]:
    """Return which metrics were read and which were not."""
    log = diagnosis.log
    read, total = len(log.written_as), len(log.written_as) + len(log.unknown)
    names = diagnosis.not_found or tuple(CORE_METRICS)
    listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    were = "was" if len(names) == 1 else "were"
    was_found = f"{were} {'not found' if diagnosis.not_found else 'found'} in this log"
    output = [f"{listed[0].upper()}{listed[1:]} {was_found}; {read} of {total} metrics were read."]
    if renamed := _renamed_metrics(log):
        output.append(f"Read as: {renamed}")
    if log.unknown:
        likely = sort_unread(log.unknown)
        num_more = len(likely) - MAX_NAMED
        rest = f" and {num_more} more" if num_more > 0 else ""
        unread = f"Not read: {', '.join(name[:80] for name in likely[:MAX_NAMED])}{rest}"
        output.append(f"{unread}{_naming_hint(diagnosis)}")
    return output


def sort_unread(names: Sequence[str]) -> list[str]:
    """Return unread metrics, those first whose name looks like one that a diagnosis needs."""
    return sorted(names, key=lambda n: not any(part in n.lower() for part in LIKELY_NAME_PARTS))


def _naming_hint(diagnosis: ScalarDiagnosis) -> str:
    """Return how to name a missing metric, if an unread name looks like one."""
    hints = {
        f"--metric {metric}=NAME": None
        for topic, metric, part in CORE_NAME_PARTS
        if topic in diagnosis.not_found and any(part in n.lower() for n in diagnosis.log.unknown)
    }
    return f". If one is a missing metric: {' '.join(hints)}" if hints else ""


def _renamed_metrics(log: ScalarLog) -> str:
    """Return which metric was taken for which, of a log from no known trainer."""
    if log.trainer.recognised:
        return ""
    pairs = log.written_as.items()
    renamed = [
        f"{metric} = {name[:80]}"
        for metric, name in pairs
        if name.removeprefix(TRAIN_PREFIX) != metric
    ]
    return ", ".join(renamed)


def headline_text(diagnosis: ScalarDiagnosis) -> str:
    """Return the verdict as a sentence."""
    failed = diagnosis.with_verdict(Verdict.FAIL)
    if not failed and diagnosis.verdict is RunVerdict.UNREAD:
        return f"Not enough to judge: the log has no {' and no '.join(diagnosis.not_found)}."
    if not failed:
        return "No sign of trouble in the metrics read. Other causes stay undecided."
    sign, finding = failed[0]
    if diagnosis.cause is not None:
        return f"Cause: {diagnosis.cause}, first seen in step {finding.step} ({sign.name})"
    causes = diagnosis.causes
    likely = f" Most likely cause: {causes[0].name}, of {len(causes)} that fit." if causes else ""
    return f"Something is wrong: {sign.name}, first seen in step {finding.step}.{likely}"
