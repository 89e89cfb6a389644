"""Names the cause of a distance between sampler and policy right after a weight sync.

Reads the result of the probe `sampler_sync`. It is available before the step is sampled, so a cause
is named before the run trains on it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LIMITS = {"fp32": 2e-4, "bf16": 0.3}
"""Nats, mean over the most likely tokens: two engines differ by 1e-5 in fp32 and by up to 0.07 in
bf16 (a model of 135M)."""
TIMES = 5.0  # ratio between an unexplained distance and an explained one

PREFIX, TEMPERATURE, WEIGHTS = "stale-prefix-cache", "temperature-on-one-side", "stale-sampler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """The cause of a failed sync, and a sentence with the measured distance."""

    cause: str
    summary: str


def named(answer: Mapping[str, Any] | None, dtype: str) -> Named | None:
    """Return the fault of a weight sync; None if the sync is correct or was not probed."""
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
            summary=f"right after a sync, sampler and policy are {apart} after a repeated "
            f"prompt, and {fresh:.3g} after a new one",
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
    """Return the sampler's compute dtype from run.json."""
    sampler = run.get("sampler")
    return str(sampler.get("dtype", "bf16")) if isinstance(sampler, Mapping) else "bf16"
