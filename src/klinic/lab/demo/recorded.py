"""A recorded run of TRL with a bug, shipped with the package. Imports no torch.

The run was made by examples/sick_trl.py: completions come from a model that is never updated.
"""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from rich.table import Table

from klinic.evidence.files import Journal
from klinic.evidence.run_facts import METRICS
from klinic.evidence.writing import write_atomically
from klinic.lab.demo.out_folder import check_empty
from klinic.report.live_view import sparkline
from klinic.training.run_folder import new_folder

SHIPPED = "sick_run"  # in this package
CAUSE = "stale-sampler"
BUG = "completions come from a second model that is never updated."
NAME = "sick"  # runs/sick
CURVES = {"reward": "Reward", "kl": "KL, nats per token", "grad_norm": "Gradient norm"}


def copy_recorded_run(out: Path | None) -> Path:
    """Copy the recorded run to a new folder, and return that."""
    if out is not None:
        check_empty(out)
    folder = new_folder(None if out is None else str(out), NAME, instead="Give another --out.")
    _copy_files(files("klinic.lab.demo") / SHIPPED, folder)
    return folder


def _copy_files(source: Traversable, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for entry in source.iterdir():
        if entry.is_dir():
            _copy_files(entry, target / entry.name)
        else:
            write_atomically(target / entry.name, entry.read_bytes())


def curve_table(run: Path) -> Table:
    """Return the curves that the trainer's own log shows."""
    entries = list(Journal(run / METRICS).entries())
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    table.add_column("")
    for title in ("first", "last", "highest"):
        table.add_column(title, justify="right")
    table.add_column("")
    for metric, label in CURVES.items():
        values = [float(entry[metric]) for entry in entries]
        numbers = (f"{value:.2f}" for value in (values[0], values[-1], max(values)))
        table.add_row(label, *numbers, sparkline(values, 2 * len(values)))
    return table
