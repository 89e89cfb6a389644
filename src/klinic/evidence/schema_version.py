"""Schema version of the file formats; apart from `record.py`, which imports NumPy."""

SCHEMA = 2
"""Version of every file format in this package; all older ones are read.

2 adds `process`, `loss_denominator`, `token_advantage` and `logp_teacher`.
"""
