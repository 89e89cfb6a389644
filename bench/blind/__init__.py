"""Sealed blind sets, kept after they were run once: scripts, truths, and the names that count."""
