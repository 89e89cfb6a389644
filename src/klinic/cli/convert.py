"""`klinic convert INPUT OUT`: write the run of another trainer in klinic's format."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from klinic.cli.chosen_run import choose_run
from klinic.cli.metric_option import Metric, given_names
from klinic.cli.plain_text import echo_text
from klinic.cli.printing import Json, print_json, require_modules
from klinic.cli.progress import show_progress
from klinic.errors import ConfigError

if TYPE_CHECKING:
    from klinic.doctor.dump_conversion import ConvertedRun
    from klinic.evidence.readers.dumps.token_dump import TokenDump
    from klinic.evidence.readers.log import ScalarLog

Input = Annotated[
    Path,
    typer.Argument(
        metavar="INPUT", help="The output folder, dump or log of a trainer.", show_default=False
    ),
]
Out = Annotated[
    Path,
    typer.Argument(
        metavar="OUT", help="The run folder to write; it must be new or empty.", show_default=False
    ),
]


def convert(path: Input, out: Out, metric: Metric = None, json: Json = False) -> None:
    """Write the run of another trainer in klinic's format, for report and comparison."""
    from klinic.cli.diagnose_dump import add_run_facts, find_scalars
    from klinic.doctor.dump_conversion import convert_run
    from klinic.evidence.readers.find import has_records, read_log

    if not path.exists():
        raise ConfigError(f"{path} does not exist. Give the output folder or a log of a trainer.")
    if has_records(path):
        raise ConfigError(f"{path} has klinic's format. Use it as it is: klinic report {path}.")
    path = choose_run(path)
    dump, also = find_dump(path)
    names = given_names(metric)
    log: ScalarLog | None
    if dump is None:
        log, unread = read_log(path, names), ""
    else:
        dump = add_run_facts(dump, path)
        log, unread = find_scalars(path, dump.path, names)
    with show_progress("Converting the steps") as progress:
        result = convert_run(dump, log, out, progress)
    if json:
        _print_json(result, dump, log, also)
    else:
        for line in _summary_lines(result, dump, log, [*also, *([unread] if unread else [])]):
            echo_text(line, hang=2)


def find_dump(path: Path) -> "tuple[TokenDump | None, list[str]]":
    """Return the most detailed dump at a path, or None, and the others."""
    from klinic.evidence.readers.dumps.find import find_dumps
    from klinic.evidence.readers.dumps.torch_files import find_torch_dump

    sources = find_dumps(path)
    also = [f"{source.path} ({source.format})" for source in sources]
    files = find_torch_dump(path)
    if files is None:
        return (sources[0].open(), also[1:]) if sources else (None, [])
    require_modules("train", "torch")
    from klinic.integrations.torch_dumps import open_torch_dump

    return open_torch_dump(files), also


def _summary_lines(
    result: "ConvertedRun", dump: "TokenDump | None", log: "ScalarLog | None", also: list[str]
) -> list[str]:
    from klinic.cli.diagnose_dump import field_names

    lines, steps = [], result.contents.steps
    if dump is not None:
        span = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps"
        lines.append(f"{dump.format[0].upper()}{dump.format[1:]}, {span}: {dump.path}")
        names = ", ".join(field_names(result.contents, dump))
        lines.append(f"Read: {names}. Not in this format: {dump.lacks}.")
    if log is not None:
        lines.append(f"Scalars: {log.format}, {len(log.steps)} steps: {log.files[0]}")
    lines.append(f"Metrics: {len(result.metric_names)} of {len(result.metric_steps)} steps.")
    if also:
        lines.append(f"Not converted: {'; '.join(also)}")
    return [*lines, f"Wrote {result.run}. Next: klinic diagnose {result.run}"]


def _print_json(
    result: "ConvertedRun", dump: "TokenDump | None", log: "ScalarLog | None", also: list[str]
) -> None:
    print_json(
        "convert",
        ok=True,
        run=str(result.run),
        format=None if dump is None else dump.format,
        steps=len(result.contents.steps),
        fields=result.contents.names,
        facts=result.contents.facts,
        lacks=None if dump is None else dump.lacks,
        scalars=None if log is None else log.to_json(),
        metrics=result.metric_names,
        not_read=also,
    )
