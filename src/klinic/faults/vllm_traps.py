"""Four ways in which a real vLLM engine silently serves something else than the policy.

They need an engine, so they are not part of the scoreboard's catalogue; the doctor detects them
with the sync probe.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from klinic.faults.base import patched
from klinic.sampler import vllm
from klinic.sampler.vllm_engine import OwnEngine, Start


@dataclass(frozen=True, slots=True, kw_only=True)
class Trap:
    """A defect that raises no error."""

    cause: str
    """The cause that the doctor must name."""
    inject: Callable[[], AbstractContextManager[None]]
    needs: str = ""
    """`adapter` or `temperature`: feature of the run that it requires; empty for any run."""


@contextmanager
def head_not_packed() -> Iterator[None]:
    """Keep the old packed copy of a tied head, as vLLM's own lifecycle does on a CPU."""

    def plain(real: Any, *given: Any, **options: Any) -> Any:
        return real(*given, **options, pack_head=False)

    with patched(vllm, "WeightSender", plain):
        yield


@contextmanager
def prefix_cache_kept() -> Iterator[None]:
    """Do not reset the prefix cache after a sync."""
    with patched(OwnEngine, "forget_prefixes", lambda *_: None):
        yield


@contextmanager
def adapter_not_delivered() -> Iterator[None]:
    """Load every adapter, and select none when sampling."""

    def without(real: Any, engine: Any, asked: Any, _adapter: Any) -> Any:
        return real(engine, asked, None)

    with patched(OwnEngine, "generate", without):
        yield


@contextmanager
def raw_log_probs() -> Iterator[None]:
    """Report log-probs of the unprocessed logits, vLLM's default."""

    def raw(real: Any, start: Start) -> Any:
        return {**real(start), "logprobs_mode": "raw_logprobs"}

    with patched(Start, "arguments", raw):
        yield


TRAPS = {
    "head not packed": Trap(cause="stale-sampler", inject=head_not_packed),
    "prefix cache kept": Trap(cause="stale-prefix-cache", inject=prefix_cache_kept),
    "adapter not delivered": Trap(
        cause="stale-sampler", inject=adapter_not_delivered, needs="adapter"
    ),
    "raw log-probs": Trap(
        cause="temperature-on-one-side", inject=raw_log_probs, needs="temperature"
    ),
}
