"""Recognises the trainer of a log by its metric names.

A trainer is recognised by at least two names that no other uses, a fork by names that its base
lacks. An unrecognised log is read by the names of all trainers.
"""

from collections import Counter
from collections.abc import Iterable

from klinic.evidence.readers.names import KLINIC, TRAINERS, TRL, UNRECOGNISED
from klinic.evidence.readers.trainer import TRAIN_PREFIX, Trainer

MIN_OWN_NAMES = 2  # distinctive names that identify a trainer: one may be chance
FAMILIES = {
    base.name: frozenset().union(
        *(t.all_names for t in TRAINERS if base.name in (t.name, t.fork_of))
    )
    for base in TRAINERS
    if not base.fork_of
}
"""The names of each trainer and its forks, by the trainer's name."""


def _shared_names() -> frozenset[str]:
    """Return the names that several families use, apart from those of TRL and klinic alone."""
    counts = Counter(name for names in FAMILIES.values() for name in names)
    counts.subtract(TRL.all_names & KLINIC.all_names)
    return frozenset(name for name, count in counts.items() if count > 1)


SHARED_NAMES = _shared_names()


def recognise_trainer(metric_names: Iterable[str]) -> Trainer:
    """Return the trainer with most of a log's distinctive names; on a tie `UNRECOGNISED`.

    >>> recognise_trainer(["loss", "kl", "completions/mean_length", "num_tokens"]).name
    'TRL'
    >>> recognise_trainer(["loss", "kl", "reward"]).recognised
    False
    """
    names = _without_prefix(metric_names)
    own_names = names - SHARED_NAMES
    counts = {base: len(own_names & family) for base, family in FAMILIES.items()}
    first, second, *_ = sorted(counts, key=lambda base: counts[base], reverse=True)
    if counts[first] == counts[second] or counts[first] < MIN_OWN_NAMES:
        return UNRECOGNISED
    return _select_fork(next(t for t in TRAINERS if t.name == first), names)


def trl_or_unrecognised(metric_names: Iterable[str]) -> Trainer:
    """Return TRL or a fork of it if a log of transformers has a distinctive name of TRL."""
    names = _without_prefix(metric_names)
    return _select_fork(TRL, names) if names & TRL.all_names - SHARED_NAMES else UNRECOGNISED


def _select_fork(base: Trainer, names: frozenset[str]) -> Trainer:
    """Return the fork of a trainer whose marks are all among the names, or the trainer itself."""
    forks = (t for t in TRAINERS if t.fork_of == base.name and names.issuperset(t.fork_marks))
    return next(forks, base)


def _without_prefix(names: Iterable[str]) -> frozenset[str]:
    return frozenset(name.removeprefix(TRAIN_PREFIX) for name in names)
