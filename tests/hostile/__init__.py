"""Hostile input, seeded. A package, so that a file here may have the name of one elsewhere in tests."""
