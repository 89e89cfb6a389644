"""Ablations: a recipe with varied keys over several seeds, with statistics.

plan.py        settings x seeds; validates every recipe before the first run
trial.py       trains and evaluates one trial in a subprocess
sequence.py    runs trials sequentially
on_tune.py     runs trials in parallel on Ray Tune
measures.py    the measures of a trial
intervals.py   Student's t over seeds, paired differences, correction for many tests
coverage.py    simulates how often those intervals cover
verdict.py     recommends a setting, or reports that none is better than the baseline
plots.py       curves, accuracy and retention against KL, the Pareto front
results.py     reads the results of trials, writes them as Parquet
page.py        the HTML page
"""
