"""Ablations: a recipe with varied keys over several seeds, with statistics.

plan.py        settings x seeds; validates every recipe before the first run
trial.py       trains and evaluates one trial in a subprocess
sequence.py    runs trials sequentially
on_tune.py     runs trials in parallel on Ray Tune
measures.py    the measures of a trial
intervals.py   Student's t over seeds, paired differences, correction for many tests
coverage.py    simulates how often those intervals cover
starts.py      warm starts as a second factor: which values are independent
equivalence.py tests of equivalence within a margin, and the correction for many tests
power.py       power of a comparison, before the runs
pilot.py       the seeds that a study needs, from the spread of a pilot
comparison.py  compares settings with the baseline: paired differences, corrected tests
verdict.py     recommends a setting or reports that none is better
plots.py       curves, accuracy and retention against KL, the Pareto front
results.py     reads the results of trials, writes them as Parquet
page.py        the HTML page
"""
