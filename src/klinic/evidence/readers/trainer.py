"""A trainer whose logs klinic reads, and its metric names."""

from collections.abc import Mapping
from dataclasses import dataclass, field

TRAIN_PREFIX = "train/"  # prefix of transformers, NeMo-RL and slime for TensorBoard and W&B


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A trainer and its metric names."""

    name: str
    names: Mapping[str, str]
    """Maps its names to klinic's."""
    marks: tuple[str, ...] = ()
    """Further names that identify it."""
    source: str = ""
    """Version and files in which the names were read."""
    fork_of: str = ""
    """The trainer whose names it shares; `fork_marks` distinguish the two."""
    fork_marks: tuple[str, ...] = ()
    """Names that a fork logs and its base does not; all of them must be present."""
    has_k3: bool = False
    """Whether its `kl` is k3, which is never negative."""
    drops_nan: bool = False
    """Whether it omits non-finite values, so that a gap in a column means one."""
    klinic_records: str = ""
    """How to get token-level records from it."""
    why_none: Mapping[str, str] = field(default_factory=dict)
    """By klinic's name of a metric: why a healthy run may not log it."""
    zero_is_none: tuple[str, ...] = ()
    """Metrics, by klinic's name, that are 0 in every step if they are not measured."""
    recognised: bool = True
    """False for the fallback of logs from an unknown trainer."""

    @property
    def all_names(self) -> frozenset[str]:
        """All names by which the trainer may be recognised."""
        return frozenset((*self.names, *self.marks))

    def klinic_name(self, name: str) -> str | None:
        """Return klinic's name of a metric, or None."""
        return self.names.get(name) or self.names.get(name.removeprefix(TRAIN_PREFIX))
