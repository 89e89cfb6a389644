"""Prints the results of an ablation: a table where a terminal has room, else one line a setting."""

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from klinic.cli.printing import print_line
from klinic.cli.text_layout import print_text
from klinic.lab.ablation.page import PAGE, classify_noise, format_difference, format_mean
from klinic.lab.ablation.results import AblationSummary
from klinic.lab.ablation.verdict import summary_lines

BEST = " <- best"
WIDEST = 1000  # columns: a table is measured as if it had them


def print_results(folder: Path, summary: AblationSummary, console: Console) -> None:
    """Print settings, verdict, failed trials and the path of the page."""
    if summary.results:
        _print_settings(summary, console)
        print_text(console, summary.verdict.says, indent=(0, 0))
    for name, reason in summary.failures:
        print_text(console, f"{name}: {reason}", label="Failed: ")
    if summary.failures:
        print_line(console, "Rerun the same command to retry failed trials.")
    if summary.results:
        print_line(console, f"\nPage: {folder / PAGE}")


def _print_settings(summary: AblationSummary, console: Console) -> None:
    """Print the table, or in a pipe or a narrow terminal the lines, which say the same."""
    table = _settings_table(summary)
    unlimited = console.options.update(max_width=WIDEST)
    if console.is_terminal and console.measure(table, options=unlimited).maximum <= console.width:
        console.print(table)
        return
    for line in summary_lines(summary.table, summary.verdict):
        print_text(console, line)
    print_line(console)


def _settings_table(summary: AblationSummary) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("setting", no_wrap=True)
    learnt = summary.learnt
    names = list(dict.fromkeys(("accuracy", learnt, "retention", "kl_token")))
    for name in [*names[:-1], "KL/token", f"{learnt} to baseline"]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in summary.table:
        gap = row.differences.get(learnt)
        means = (row.means[name] for name in names)
        table.add_row(
            row.setting + (BEST if row.setting == summary.verdict.best else ""),
            *(format_mean(mean).replace(" ", "") for mean in means),
            "baseline"
            if gap is None
            else f"{format_difference(gap).split(' ')[0]} {classify_noise(gap)}".strip(),
        )
    return table
