"""The option `--metric`: names of the metrics in a log that klinic does not recognise."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from klinic.errors import ConfigError

Metric = Annotated[
    list[str] | None,
    typer.Option(
        "--metric",
        metavar="KL=NAME",
        help="The log's name of a metric, such as kl=kl_to_ref; may be repeated.",
        show_default=False,
    ),
]


def given_names(metric: list[str] | None) -> Mapping[str, str]:
    """Return the names that `--metric` gives."""
    if not metric:
        return {}
    from klinic.evidence.readers.given_names import parse_names

    return parse_names(metric)


def refuse_names(run: Path, metric: list[str] | None) -> None:
    """Raise if `--metric` is given for a run of klinic, whose names are known."""
    if metric:
        raise ConfigError(f"{run} is a run of klinic: --metric names those of a log. Omit it.")
