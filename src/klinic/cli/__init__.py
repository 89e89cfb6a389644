"""The command line. Importing it imports neither torch nor NumPy.

app.py            the `klinic` command, error handling and exit codes
help_page.py      help pages: commands by group, options, examples
train.py          `klinic train`
dry_run.py        `klinic train --dry-run`: sizes, memory and cost of a recipe
step_cost.py      compute, data movement and disk use of a step
supervisor.py     parent process that restarts a lost run
eval.py           `klinic eval`
ablate.py         `klinic ablate`
ablation_view.py  prints the results of an ablation
ablate_power.py   the seeds that a difference needs
export.py         `klinic export`
check.py          `klinic check`
verify.py         `klinic verify`
verify_tables.py  its tables
diagnose.py       `klinic diagnose`, of run folders and of scalar logs
diagnosis_view.py prints a diagnosis of records
log_view.py       prints a diagnosis of scalars
proof.py          the replay of `--prove`, or why there is none
diagnose_dump.py  the same of the batch dumps of other trainers
convert.py        `klinic convert`
explain.py        `klinic explain`
fetched_run.py    a local copy of a run at a URL
chosen_run.py     the newest run of a folder of runs
lookup.py         words of `klinic explain` that are no checks
words.py          words with another name in klinic, and their answers
hypotheses.py     hypotheses about an exploding KL
metric_option.py  the `--metric` option: names of the metrics in a log
report.py         `klinic report`
bundle.py         `klinic bundle`
watch.py          `klinic watch`, and its single key presses
demo.py           `klinic demo`
printing.py       JSON and console output, missing optional dependencies
plain_text.py     messages without rich, wrapped between words
text_layout.py    text that wraps between words, lists, commands to run next
progress.py       progress bar and findings cache
recorded_code.py  the `--run-code` option
output.py         standard streams that survive a closed reader
process_exit.py   process exit despite leftover threads
"""

from klinic.cli.app import main

__all__ = ["main"]
