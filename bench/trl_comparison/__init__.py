"""klinic and TRL from the same start, on the same prompts in the same order.

__main__.py   the command: `python -m bench.trl_comparison`
entry.py      one run of the race, and what stands in a race's folder
settings.py   the settings of a run in the words of both trainers, and what remains unequal
prompts.py    the order of the prompts, and a reward function that holds trainers to it
trainers.py   a run with klinic, a run with TRL
measure.py    the start, and the held-out accuracy of what was trained
one.py        one run in a process of its own
table.py      all results as one table
"""
