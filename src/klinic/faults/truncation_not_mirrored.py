"""truncation-not-mirrored: the sampler truncates as declared, and the learner scores all tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.learner.local import LocalLearner
from klinic.model.token_filters import NO_FILTERS, TokenFilters

TOP_K = 2
FILTERS = {Severity.MILD: TokenFilters(top_k=TOP_K + 1), Severity.NORMAL: NO_FILTERS}
"""What the learner applies instead of the declared truncation."""


@contextmanager
def score_all_tokens(severity: Severity) -> Iterator[None]:
    """Let the learner normalise over more tokens than the sampler samples from."""

    def batch_unfiltered(real: Any, self: Any, *args: Any) -> Any:
        declared = self.settings
        self.settings = replace(declared, filters=FILTERS[severity])
        try:
            return real(self, *args)
        finally:
            self.settings = declared

    with patch_attribute(LocalLearner, "make_micro_batches", batch_unfiltered):
        yield


FAULT = Fault(
    cause="truncation-not-mirrored",
    mechanism="the learner scores tokens that top-k excludes",
    inject=score_all_tokens,
    settings={"sampling.top_k": TOP_K},
    visible_at_start=True,
)
