"""Run the real components on one batch before a run, or replay a recorded step to prove a cause."""
