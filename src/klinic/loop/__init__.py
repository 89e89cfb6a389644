"""Training: the loop, the run it makes, and what is told while it goes on."""
