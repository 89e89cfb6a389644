"""Prints the scoreboard as a table."""

from typing import Any

from rich.console import Console
from rich.table import Table

from klinic.lab.scoreboard_outcome import HEALTHY, Outcome


def print_scoreboard(
    figures: dict[str, Any], outcomes: dict[int, list[Outcome]], console: Console
) -> None:
    """Print one line per cause with the causes named instead, and the overall figures."""
    table = Table("cause", "normal", "mild", "second", "second, mild", "named instead")
    for cause, rates in figures["by_cause"].items():
        instead = {k: n for k, n in rates["also_named"].items() if k != cause}
        table.add_row(
            cause,
            *(_percent(rates[k]) for k in ("normal", "mild", "second_normal", "second_mild")),
            ", ".join(f"{name} {num}" for name, num in instead.items()),
        )
    console.print(table)
    for name in ("cases", "top1", "top3", "abstained", "wrong", "second_mechanism_top1"):
        console.print(f"{name}: {figures[name]:.3g}", highlight=False)
    for name, rates in figures["without"].items():
        console.print(f"without {name}: {rates}", highlight=False)
    console.print(f"proved by a replay: {figures['proved']:.3g}", highlight=False)
    console.print(f"failed trials: {figures['errors']}", highlight=False)
    for failed in (o for each in outcomes.values() for o in each if o.error is not None):
        where = f"{failed.cause}, {failed.severity}, seed {failed.seed}"
        console.print(f"  {where}: {failed.error}", markup=False, highlight=False)
    alarms = [o for o in outcomes[0] if o.named is not None]
    console.print(f"false alarms: {len(alarms)} of {figures['healthy_runs']} {HEALTHY} runs")
    for alarm in alarms:
        console.print(f"  {alarm.severity}, seed {alarm.seed}: {alarm.named}", highlight=False)


def _percent(rate: float) -> str:
    return "-" if rate != rate else f"{rate:.0%}"  # noqa: PLR0124 - NaN is not itself
