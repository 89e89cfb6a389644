"""Ablations: a recipe with varied keys over several seeds, with statistics.

plan.py        settings x seeds; validates every recipe before the first run
trial.py       trains and evaluates one trial in a subprocess
sequence.py    runs trials sequentially
on_tune.py     runs trials in parallel on Ray Tune
measures.py    the measures of a trial
intervals.py   confidence intervals, and paired differences over seeds
verdict.py     recommends a setting, or reports that the seeds do not separate them
plots.py       curves, accuracy and retention against KL, the Pareto front
results.py     reads the results of trials, writes them as Parquet
page.py        the HTML page
"""
