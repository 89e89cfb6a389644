"""stale-sampler: the sampler keeps the initial weights, and reports the new ones as loaded.

Second mechanism: the sync delivers the base weights, and never the adapter.
"""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.faults.sampler_patches import use_weights, while_sampling
from klinic.sampler.protocol import LoadResult
from klinic.training import train

SYNC_EVERY = {Severity.MILD: 3, Severity.NORMAL: 10**9}  # updates between two syncs that arrive


@contextmanager
def skip_weight_syncs(severity: Severity) -> Iterator[None]:
    """Give the sampler a copy of the policy that most syncs do not reach."""

    def make_separate_sampler(real: Any, recipe: Any, policy: Any, *args: Any) -> Any:
        own_policy = replace(policy, scorer=copy.deepcopy(policy.scorer))
        sampler = real(recipe, own_policy, *args)
        load = sampler.load

        def load_rarely(weights: Any) -> LoadResult:
            if weights.version % SYNC_EVERY[severity] == 0 and weights.version:
                own_policy.lm.load_state_dict(policy.lm.state_dict())
            load(weights)
            return LoadResult(fingerprint=weights.fingerprint)

        sampler.load = load_rarely
        return sampler

    with patch_attribute(train, "make_sampler", make_separate_sampler):
        yield


FAULT = Fault(
    cause="stale-sampler",
    mechanism="weights are never delivered, and the sampler reports them as loaded",
    inject=skip_weight_syncs,
)


# name pattern of the lost weights: the whole adapter, or that of one layer type
LOST_WEIGHT_PATTERN = {Severity.MILD: "o_proj.lora_B", Severity.NORMAL: "lora_B"}


@contextmanager
def drop_adapter_weights(severity: Severity) -> Iterator[None]:
    """Sample without the adapter; the sampler reports all weights as loaded."""

    def use_base_weights(scorer: Any, _streams: Any) -> AbstractContextManager[None]:
        lost = {n: p for n, p in scorer.lm.named_parameters() if LOST_WEIGHT_PATTERN[severity] in n}
        return use_weights(scorer.lm, {name: torch.zeros_like(p) for name, p in lost.items()})

    with while_sampling(use_base_weights):
        yield


SECOND_FAULT = Fault(
    cause="stale-sampler",
    mechanism="the adapter never reaches the sampler",
    inject=drop_adapter_weights,
    settings={"model.lora_rank": 8, "learner.learning_rate": 3e-3},
)
