"""What the distance between sampler and policy, right after a sync, says about its cause.

The answer is that of the probe `sampler_sync`. It is there before the step is sampled, so a cause
can be named before anything is learnt from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LIMITS = {"fp32": 2e-4, "bf16": 0.3}
"""Nats, in the mean over the likeliest outcomes: two engines differ by 1e-5 in fp32 and by up to
0.07 in bf16 (a model of 135M)."""
TIMES = 5.0  # between a distance that a mistake explains and one that it does not

PREFIX, TEMPERATURE, WEIGHTS = "stale-prefix-cache", "temperature-on-one-side", "stale-sampler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A cause, and what was measured, in a sentence."""

    cause: str
    summary: str


def named(answer: Mapping[str, Any] | None, dtype: str) -> Named | None:
    """Return what a sync went wrong by; None where it went well or was not probed."""
    if not answer or answer.get("repeated") is None or answer.get("fresh") is None:
        return None
    repeated, fresh = float(answer["repeated"]), float(answer["fresh"])
    limit = LIMITS.get(dtype, LIMITS["bf16"])
    if max(repeated, fresh) <= limit:
        return None
    apart = f"{max(repeated, fresh):.3g} nats apart (limit {limit:g})"
    if repeated > TIMES * fresh:
        return Named(
            cause=PREFIX,
            summary=f"right after a sync, sampler and policy are {apart} behind a prompt that was "
            f"asked before, and {fresh:.3g} behind a new one",
        )
    for key, cause, alike in (
        ("raw", TEMPERATURE, "at temperature 1"),
        ("adapter_off", WEIGHTS, "without its adapter"),
    ):
        other = answer.get(key)
        if other is not None and TIMES * float(other) < fresh:
            return Named(
                cause=cause,
                summary=f"right after a sync, sampler and policy are {apart}, and only "
                f"{float(other):.3g} from the policy {alike}",
            )
    return Named(
        cause=WEIGHTS, summary=f"right after a sync, sampler and policy are {apart}, on any prompt"
    )


def dtype_of(run: Mapping[str, Any]) -> str:
    """Return the precision that the sampler computes in, as run.json says."""
    sampler = run.get("sampler")
    return str(sampler.get("dtype", "bf16")) if isinstance(sampler, Mapping) else "bf16"
