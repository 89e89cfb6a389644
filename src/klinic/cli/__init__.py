"""The command line. Importing it imports neither torch nor NumPy.

app.py            the `klinic` command, error handling and exit codes
train.py          `klinic train`
dry_run.py        `klinic train --dry-run`: sizes, memory and cost of a recipe
step_cost.py      compute, data movement and disk use of a step
supervisor.py     parent process that restarts a lost run
eval.py           `klinic eval`
ablate.py         `klinic ablate`
export.py         `klinic export`
check.py          `klinic check`
verify.py         `klinic verify`
verify_tables.py  its tables
diagnose.py       `klinic diagnose`, of run folders and of scalar logs
explain.py        `klinic explain`
report.py         `klinic report`
watch.py          `klinic watch`, and its single key presses
demo.py           `klinic demo`
printing.py       JSON and console output, missing optional dependencies
progress.py       progress bar and findings cache
recorded_code.py  the `--run-code` option
output.py         standard streams that survive a closed reader
process_exit.py   process exit despite leftover threads
"""

from klinic.cli.app import main

__all__ = ["main"]
