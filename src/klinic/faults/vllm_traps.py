"""Four ways in which a real vLLM engine silently serves something else than the policy.

They need an engine, so they are not part of the scoreboard's catalogue; the doctor detects them
with the sync probe.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from klinic.faults.base import patch_attribute
from klinic.sampler.vllm import sampler
from klinic.sampler.vllm.engine import EngineConfig, SubprocessEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmTrap:
    """A defect that raises no error."""

    cause: str
    """The cause that the doctor must name."""
    inject: Callable[[], AbstractContextManager[None]]
    needs: str = ""
    """`adapter` or `temperature`: feature of the run that it requires; empty for any run."""


@contextmanager
def skip_head_packing() -> Iterator[None]:
    """Keep the old packed copy of a tied head, as vLLM's own lifecycle does on a CPU."""

    def send_unpacked(real: Any, *args: Any, **options: Any) -> Any:
        return real(*args, **options, pack_head=False)

    with patch_attribute(sampler, "WeightSender", send_unpacked):
        yield


@contextmanager
def keep_prefix_cache() -> Iterator[None]:
    """Do not reset the prefix cache after a sync."""
    with patch_attribute(SubprocessEngine, "reset_prefix_cache", lambda *_: None):
        yield


@contextmanager
def drop_adapter() -> Iterator[None]:
    """Load every adapter, and select none when sampling."""

    def generate_without_adapter(real: Any, engine: Any, requests: Any, _adapter: Any) -> Any:
        return real(engine, requests, None)

    with patch_attribute(SubprocessEngine, "generate", generate_without_adapter):
        yield


@contextmanager
def report_raw_logps() -> Iterator[None]:
    """Report log-probs of the unprocessed logits, vLLM's default."""

    def raw_arguments(real: Any, start: EngineConfig) -> Any:
        return {**real(start), "logprobs_mode": "raw_logprobs"}

    with patch_attribute(EngineConfig, "engine_arguments", raw_arguments):
        yield


VLLM_TRAPS = {
    "head not packed": VllmTrap(cause="stale-sampler", inject=skip_head_packing),
    "prefix cache kept": VllmTrap(cause="stale-prefix-cache", inject=keep_prefix_cache),
    "adapter not delivered": VllmTrap(cause="stale-sampler", inject=drop_adapter, needs="adapter"),
    "raw log-probs": VllmTrap(
        cause="temperature-on-one-side", inject=report_raw_logps, needs="temperature"
    ),
}
