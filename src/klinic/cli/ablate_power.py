"""`klinic ablate FOLDER --detect D`: the seeds that show a difference, before the runs."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from klinic.cli.printing import print_json, print_line
from klinic.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from klinic.lab.ablation.comparison import Question
    from klinic.lab.ablation.pilot import PowerRow


def print_power(
    folders: Sequence[str],
    baseline: str | None,
    detect: float,
    question: "Question",
    console: "Console | None",
) -> None:
    """Print the seeds that a difference needs; as JSON without a console."""
    from klinic.lab.ablation.pilot import power_rows, read_pilot

    if not detect > 0:
        raise ConfigError(f"--detect {detect:g}: name a difference above 0.")
    trials = [trial for folder in folders for trial in read_pilot(Path(folder))]
    rows = power_rows(trials, baseline, detect, question)
    if console is None:
        print_json("ablate", ok=True, detect=detect, power=[asdict(row) for row in rows])
        return
    console.print(_power_table(rows))
    print_line(console, f"Seeds, or starts with one seed each, that show {detect:g} in 80% of")
    print_line(console, "cases, corrected for one test of each setting. A pilot knows its spread")
    print_line(
        console, "badly: plan with the limit, which the spread is below with 80% confidence."
    )
    if question.margin is not None:
        print_line(
            console, f"Equal: seeds that find equals equivalent within {question.margin:g}, at the"
        )
        print_line(console, "limit.")


def _power_table(rows: "Sequence[PowerRow]") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("measure", no_wrap=True)
    for name in ("spread", "limit", "seeds", "seeds at limit", "equal"):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = (row.num, row.num_at_limit, row.num_for_equivalence)
        cells = ("" if num is None else str(num) for num in numbers)
        table.add_row(row.measure, f"{row.spread:.4f}", f"{row.limit:.4f}", *cells)
    return table
