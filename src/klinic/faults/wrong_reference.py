"""wrong-reference: the reference is a perturbed copy of the initial policy.

Second mechanism: the reference is the base model from before supervised training.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.model.reference import make_reference
from klinic.model.tiny import tiny_model, tiny_tokenizer
from klinic.training import build, train

# fraction of each tensor's standard deviation
NOISE_FRACTION = {
    Severity.MILD: 0.01,
    Severity.NORMAL: 0.1,
}


@contextmanager
def perturb_reference(severity: Severity) -> Iterator[None]:
    """Add noise to every weight of the reference."""

    def start_perturbed_reference(real: Any, *arguments: Any) -> Any:
        reference = real(*arguments)
        random = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in reference.scorer.lm.parameters():
                p.add_(NOISE_FRACTION[severity] * p.std() * torch.randn(p.shape, generator=random))
        return reference

    with patch_attribute(train, "start_reference", start_perturbed_reference):
        yield


FAULT = Fault(
    cause="wrong-reference",
    mechanism="other weights than the initial ones",
    inject=perturb_reference,
    visible_at_start=True,
)


# name pattern of weights taken from the base: all layers, or a part of one
BASE_WEIGHT_PATTERN = {Severity.MILD: "layers.0.self_attn.o_proj", Severity.NORMAL: "layers."}


@contextmanager
def use_base_reference(severity: Severity) -> Iterator[None]:
    """Build the reference from an untrained model."""

    def base_reference(_real: Any, policy: Any, *, source: str, **_options: Any) -> Any:
        scorer = copy.deepcopy(policy)
        base = tiny_model(tiny_tokenizer(), seed=0).state_dict()
        chosen = {name: p for name, p in base.items() if BASE_WEIGHT_PATTERN[severity] in name}
        scorer.lm.load_state_dict(chosen, strict=False)
        return make_reference(scorer, source=source)

    with patch_attribute(build, "reference_at_start", base_reference):
        yield


SECOND_FAULT = Fault(
    cause="wrong-reference",
    mechanism="the reference is the base model from before supervised training",
    inject=use_base_reference,
    visible_at_start=True,
)
