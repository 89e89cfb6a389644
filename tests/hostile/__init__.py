"""Hostile input, seeded. A package: a file here may have the name of one elsewhere in tests."""
