"""Helpers that patch the sampler during training and leave evaluation unchanged."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from klinic.faults.base import patch_attribute
from klinic.sampler import transformers
from klinic.sampler.decoding import Stream


@contextmanager
def while_sampling(
    spoil: Callable[[Any, Sequence[Stream]], AbstractContextManager[Any]],
) -> Iterator[None]:
    """Decode within `spoil(scorer, streams)`; at temperature 0, an evaluation, unchanged."""

    def decode_spoiled(real: Any, scorer: Any, streams: Any, *, params: Any, **options: Any) -> Any:
        if params.temperature == 0:
            return real(scorer, streams, params=params, **options)
        with spoil(scorer, streams):
            return iter(list(real(scorer, streams, params=params, **options)))

    with patch_attribute(transformers, "decode", decode_spoiled):
        yield


@contextmanager
def replace_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute for the duration of the context."""
    real = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, real)


def copy_weights(lm: Any) -> dict[str, torch.Tensor]:
    """Return a copy of the current weights."""
    return {name: p.detach().clone() for name, p in lm.named_parameters()}


@contextmanager
def use_weights(lm: Any, weights: dict[str, torch.Tensor]) -> Iterator[None]:
    """Give a model other weights for the duration of the context; missing names stay."""
    parameters = {name: p for name, p in lm.named_parameters() if name in weights}
    original = {name: p.data for name, p in parameters.items()}
    for name, p in parameters.items():
        p.data = weights[name]
    try:
        yield
    finally:
        for name, p in parameters.items():
            p.data = original[name]
