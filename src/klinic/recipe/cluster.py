"""The `cluster` section: which processes a run is made of, and where they run."""

from klinic.recipe.section import Count, CountOrZero, Section, Text


class ClusterSection(Section):
    """Processes that Ray starts and klinic keeps alive. `learner.shards` says how many learners."""

    samplers: Count = 1
    """Processes that sample, each with the policy's weights."""
    reward_workers: CountOrZero = 0
    """Processes that call reward functions; 0 is the first process alone."""
    max_staleness: CountOrZero = 0
    """Steps by which sampling may run ahead of training; 0 is that neither overlaps the other."""
    address: Text | None = None
    """Head node of a running Ray, host:port; null starts one on this machine for the run."""
