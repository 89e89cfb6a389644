"""Reward functions: what they are, and how they are called.

function.py     a reward function with its name and weight
arguments.py    what such a function is called with
returned.py     numbers out of whatever it returned
runner.py       the completions of a step through all functions
scores.py       what came out, and its statistics
batch.py        rewards and advantages put to the rows of a step
"""
