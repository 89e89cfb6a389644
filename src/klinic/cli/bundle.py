"""`klinic bundle RUN [OUT]`: write the evidence of a run for a bug report, without its texts."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klinic.cli.plain_text import echo_text
from klinic.cli.printing import Json, format_bytes, print_json
from klinic.cli.progress import NoCache
from klinic.errors import ConfigError

if TYPE_CHECKING:
    from klinic.doctor.diagnosis import Diagnosis
    from klinic.evidence.bundle import BundleContents

NAME = "bundle.zip"
NEVER = "texts, the recipe, events, names of models, data, functions, hosts and users, paths, dates"
Run = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="A run folder with records.", show_default=False),
]
Out = Annotated[
    Path | None,
    typer.Argument(metavar="[OUT]", help="The file to write.", show_default=f"RUN/{NAME}"),
]
OutOption = Annotated[Path | None, typer.Option("--out", "-o", help="The same as OUT.")]


def bundle(
    run: Run,
    out: Out = None,
    option: OutOption = None,
    no_cache: NoCache = False,
    json: Json = False,
) -> None:
    """Write the evidence of a run to one small file for a bug report, without texts and names."""
    from klinic.cli.diagnose import diagnose_bundle, diagnose_records
    from klinic.evidence.bundle import write_bundle
    from klinic.evidence.schema import refuse_newer

    if out is not None and option is not None:
        raise ConfigError("give OUT once: as an argument or with --out.")
    path = out or option or run / NAME
    _refuse(run, path)
    refuse_newer(run)
    diagnosis = diagnose_records(run, no_cache=no_cache)
    anchors = [h.first_step for h in diagnosis.hypotheses if h.first_step is not None]
    contents = write_bundle(run, path, verdict=short_verdict(diagnosis), anchors=anchors)
    again = diagnose_bundle(path)
    is_same = short_verdict(again) == short_verdict(diagnosis)
    if json:
        verdicts = {"verdict": short_verdict(diagnosis), "verdict_of_bundle": short_verdict(again)}
        print_json("bundle", ok=is_same, **_to_json(contents), **verdicts)
    else:
        for line in _contents_lines(contents):
            echo_text(line, hang=2)
        echo_text(_verdict_line(diagnosis, again, is_same=is_same), hang=2)
    raise typer.Exit(0 if is_same else 1)


def short_verdict(diagnosis: "Diagnosis") -> dict[str, Any]:
    """Return the names of the causes and failed checks, with the first step of each cause."""
    return {
        "verdict": str(diagnosis.verdict),
        "causes": [
            {"name": cause.name, "first_step": cause.first_step} for cause in diagnosis.causes
        ],
        "unexplained": list(diagnosis.unexplained),
    }


def _refuse(run: Path, out: Path) -> None:
    from klinic.evidence.bundle_head import is_bundle
    from klinic.evidence.readers.find import has_records
    from klinic.evidence.readers.run_folders import refuse_several

    if not run.exists():
        raise ConfigError(f"{run} does not exist. Give a run folder.")
    refuse_several(run)
    if not has_records(run):
        raise ConfigError(
            f"{run} has no records of klinic's format. Of a dump of another trainer, write them "
            f"first: klinic convert {run} OUT, and then: klinic bundle OUT. A log of scalars has "
            "no records: send the output of `klinic diagnose --json`."
        )
    if out.is_dir() or (out.exists() and not is_bundle(out)):
        raise ConfigError(f"{out} exists and is not a bundle. Name a new file.")


def _contents_lines(contents: "BundleContents") -> Iterator[str]:
    steps = f"{len(contents.steps)} of {contents.num_recorded} steps"
    if len(contents.steps) < contents.num_recorded:
        steps += f" ({_spans(contents.steps)})"
    yield f"Wrote {contents.path} ({format_bytes(contents.num_bytes)}): {steps}"
    yield (
        f"{contents.num_rows:,} completions, {contents.num_tokens:,} tokens: "
        f"{', '.join(contents.columns)}"
    )
    yield f"Of every step: {', '.join(contents.facts) or 'no facts'}"
    yield f"Of run.json: {', '.join(contents.run_keys) or 'nothing'}"
    yield f"Metrics: {', '.join(contents.metrics) or 'none'}"
    yield f"Probes: {', '.join(contents.probes) or 'none'}"
    yield f"Left out: {NEVER}; of run.json: {', '.join(contents.left_out) or 'nothing'}"
    yield (
        "Token ids are numbered anew for every prompt. Log-probs are exact: whoever has the same "
        "weights can use them to confirm a guess of a text."
    )


def _verdict_line(diagnosis: "Diagnosis", again: "Diagnosis", *, is_same: bool) -> str:
    if is_same:
        return f"Verdict of the run and of the bundle: {diagnosis.headline}"
    return (
        f"Verdict of the run: {diagnosis.headline}\n"
        f"Verdict of the bundle, which differs: {again.headline}"
    )


def _spans(steps: list[int]) -> str:
    """Return numbers as ranges.

    >>> _spans([1, 2, 3, 7, 9, 10])
    '1-3, 7, 9-10'
    """
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def _to_json(contents: "BundleContents") -> dict[str, Any]:
    return {**asdict(contents), "path": str(contents.path)}
