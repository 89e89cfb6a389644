"""context-truncated: the length limit is shorter than an answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.sampler.transformers import TransformersSampler

MAX_NEW_TOKENS = {Severity.MILD: 2, Severity.NORMAL: 1}  # tokens


@contextmanager
def shorten_completions(severity: Severity) -> Iterator[None]:
    """Lower the length limit of completions."""

    def init_with_short_limit(real: Any, self: Any, *args: Any, **options: Any) -> None:
        real(self, *args, **{**options, "max_new_tokens": MAX_NEW_TOKENS[severity]})

    with patch_attribute(TransformersSampler, "__init__", init_with_short_limit):
        yield


FAULT = Fault(
    cause="context-truncated",
    mechanism="a limit of one token",
    inject=shorten_completions,
)
