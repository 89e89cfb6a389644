"""Measured comparisons, run by hand from a clone. They are not part of the package."""
