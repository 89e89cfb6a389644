"""Ablations: the same recipe with something varied, over seeds, and what may be concluded.

plan.py        settings x seeds, each checked before the first is run
trial.py       one of them, in a process of its own: trained, measured, written down
sequence.py    one after another
on_tune.py     several at once, on Ray Tune
measures.py    what is measured of a trial
intervals.py   means with intervals, and differences between seeds' pairs
verdict.py     which value to use, or that these seeds cannot tell
plots.py       curves, accuracy and retention against KL, the Pareto front
results.py     what trials left behind, read back and written as Parquet
page.py        all of it as tables on one HTML page
"""
