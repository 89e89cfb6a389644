"""Reads metrics of a log under names that the user gives: `--metric kl=kl_to_ref`."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from klinic.errors import ConfigError, EvidenceError
from klinic.evidence.readers.log import ScalarLog, read_columns
from klinic.evidence.readers.names import UNRECOGNISED

METRICS = tuple(sorted({*UNRECOGNISED.names.values(), "reward/min", "reward/max"}))
"""klinic's names of the metrics that a scalar log may have."""
MOST_SHOWN = 12  # names of a log in a message


def parse_names(pairs: Sequence[str]) -> dict[str, str]:
    """Return the log's name of each metric from `METRIC=NAME` pairs.

    >>> parse_names(["kl=kl_to_ref", "reward = avg return"])
    {'kl': 'kl_to_ref', 'reward': 'avg return'}
    """
    names = {}
    for pair in pairs:
        metric, separator, name = (part.strip() for part in pair.partition("="))
        if not separator or not name:
            raise ConfigError(
                f"--metric {pair}: give klinic's name, =, and the log's name, such as "
                "--metric kl=kl_to_ref."
            )
        if metric not in METRICS:
            near = get_close_matches(metric, METRICS, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"--metric {pair}: {metric} is no metric of klinic.{hint} Metrics are: "
                f"{', '.join(METRICS)}."
            )
        names[metric] = name
    return names


def use_names(log: ScalarLog, names: Mapping[str, str]) -> ScalarLog:
    """Return a log with the named metrics; raise if it has no such name, or no metric at all."""
    last_values: dict[str, Any] = {}
    for entry in log.entries:
        last_values.update(entry)
    for name in names.values():
        if name not in last_values:
            raise ConfigError(
                f"{log.files[0]}: has no metric {name}. It has: {_list_names(tuple(last_values))}."
            )
    if not names and not log.columns:
        shown = _list_names(log.unknown or tuple(last_values))
        raise EvidenceError(
            f"{log.files[0]}: has no metric that klinic knows, only {shown}. If one of them is the "
            "KL to the reference or the reward, say so: --metric kl=NAME --metric reward=NAME."
        )
    return read_columns(log, names, last_values) if names else log


def _list_names(names: Sequence[str]) -> str:
    rest = len(names) - MOST_SHOWN
    shown = ", ".join(name[:40] for name in names[:MOST_SHOWN])
    return f"{shown} and {rest} more" if rest > 0 else shown
