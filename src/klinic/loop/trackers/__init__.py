"""Metrics sinks of a run, one file each."""
