"""wrong-reference: the reference is the base model from before supervised training."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import assembly
from klinic.model.reference import frozen
from klinic.model.tiny import tiny_model, tiny_tokenizer

# name pattern of weights taken from the base: all layers, or a part of one
BASE = {Severity.MILD: "layers.0.self_attn.o_proj", Severity.NORMAL: "layers."}


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Build the reference from an untrained model."""

    def of_base(_real: Any, policy: Any, *, source: str, **_how: Any) -> Any:
        scorer = copy.deepcopy(policy)
        base = tiny_model(tiny_tokenizer(), seed=0).state_dict()
        chosen = {name: p for name, p in base.items() if BASE[severity] in name}
        scorer.lm.load_state_dict(chosen, strict=False)
        return frozen(scorer, source=source)

    with patched(assembly, "as_it_starts", of_base):
        yield


FAULT = Fault(
    cause="wrong-reference",
    mechanism="the reference is the base model from before supervised training",
    inject=inject,
    visible_at_start=True,
)
