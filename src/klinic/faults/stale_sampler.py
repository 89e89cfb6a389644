"""stale-sampler: the sampler keeps the initial weights, and reports the new ones as loaded."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import train
from klinic.sampler.protocol import Loaded

EVERY = {Severity.MILD: 3, Severity.NORMAL: 10**9}  # updates between two syncs that arrive


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Give the sampler a copy of the policy that most syncs do not reach."""

    def apart(real: Any, recipe: Any, policy: Any, *more: Any) -> Any:
        own = replace(policy, scorer=copy.deepcopy(policy.scorer))
        sampler = real(recipe, own, *more)
        load = sampler.load

        def loaded(weights: Any) -> Loaded:
            if weights.version % EVERY[severity] == 0 and weights.version:
                own.lm.load_state_dict(policy.lm.state_dict())
            load(weights)
            return Loaded(fingerprint=weights.fingerprint)

        sampler.load = loaded
        return sampler

    with patched(train, "make_sampler", apart):
        yield


FAULT = Fault(
    cause="stale-sampler",
    mechanism="weights are never delivered, and the sampler reports them as loaded",
    inject=inject,
)
