"""The `cluster` section: the Ray processes of a run."""

from klinic.recipe.section import Count, CountOrZero, Section, Text


class ClusterSection(Section):
    """Ray processes, restarted when they die. `learner.shards` sets the number of learners."""

    samplers: Count = 1
    """Number of sampler processes, each with a copy of the policy's weights."""
    reward_workers: CountOrZero = 0
    """Number of processes that call reward functions; 0: the driver process calls them."""
    max_staleness: CountOrZero = 0
    """Steps by which sampling may run ahead of training; 0: they alternate."""
    address: Text | None = None
    """Head node of a running Ray cluster, host:port; null starts a local one for the run."""
