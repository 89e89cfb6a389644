"""The sums task: small additions, with a warm start of half a minute for the tiny model."""
