"""Sums of small numbers alone: what a tiny model can be warmed up for in half a minute."""
