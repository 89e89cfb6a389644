"""The real parts, driven on a batch or a step: before a run, or to prove what was wrong."""
