"""Metrics sinks of a run.

protocol.py     the interface of a sink
select.py       the sinks that a recipe names
fail_safe.py    forwards to a sink until its first exception
format.py       metric tags and completion rows, shared by the sinks
console.py      lines in a file or a pipe, a live display in a terminal
held_out.py     the table of held-out values in the terminal
notebook.py     progress bar and metrics in a notebook
tensorboard.py  TensorBoard event files
wandb.py        Weights & Biases
trackio.py      trackio
"""
