"""Names the cause of a distance between sampler and policy right after a weight sync.

Reads the result of the probe `sampler_sync`: fingerprints of the tensors that arrived, and
log-probs of sampler and policy. It is available before the step is sampled, so a cause
is named before the run trains on it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from klinic.evidence.fields import NOTHING_ARRIVED

LIMIT_BY_DTYPE = {"fp32": 2e-4, "bf16": 0.3}
"""Nats, mean over the most likely tokens: two engines differ by 1e-5 in fp32 and by up to 0.07 in
bf16 (a model of 135M)."""
DISTANCE_RATIO = 5.0  # ratio between an unexplained distance and an explained one

PREFIX_CACHE, TEMPERATURE, WEIGHTS, DAMAGED = (
    *("stale-prefix-cache", "temperature-on-one-side"),
    *("stale-sampler", "corrupted-sync"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncFault:
    """The cause of a failed sync, and a sentence with the measured distance."""

    cause: str
    summary: str


def diagnose_sync(probe_result: Mapping[str, Any] | None, dtype: str) -> SyncFault | None:
    """Return the fault of a weight sync; None if the sync is correct or was not probed."""
    if probe_result and (damage := probe_result.get("damage")):
        cause = WEIGHTS if damage == NOTHING_ARRIVED else DAMAGED
        return SyncFault(cause=cause, summary=f"in a weight sync, {damage}")
    if (
        not probe_result
        or probe_result.get("repeated") is None
        or probe_result.get("fresh") is None
    ):
        return None
    repeated, fresh = float(probe_result["repeated"]), float(probe_result["fresh"])
    limit = LIMIT_BY_DTYPE.get(dtype, LIMIT_BY_DTYPE["bf16"])
    if max(repeated, fresh) <= limit:
        return None
    distance = f"{max(repeated, fresh):.3g} nats apart (limit {limit:g})"
    if repeated > DISTANCE_RATIO * fresh:
        return SyncFault(
            cause=PREFIX_CACHE,
            summary=f"right after a sync, sampler and policy are {distance} after a repeated "
            f"prompt, and {fresh:.3g} after a new one",
        )
    for key, cause, condition in (
        ("raw", TEMPERATURE, "at temperature 1"),
        ("adapter_off", WEIGHTS, "without its adapter"),
    ):
        alternative = probe_result.get(key)
        if alternative is not None and DISTANCE_RATIO * float(alternative) < fresh:
            return SyncFault(
                cause=cause,
                summary=f"right after a sync, sampler and policy are {distance}, and only "
                f"{float(alternative):.3g} from the policy {condition}",
            )
    return SyncFault(
        cause=WEIGHTS,
        summary=f"right after a sync, sampler and policy are {distance}, on any prompt",
    )


def sampler_dtype(run: Mapping[str, Any]) -> str:
    """Return the sampler's compute dtype from run.json."""
    sampler = run.get("sampler")
    return str(sampler.get("dtype", "bf16")) if isinstance(sampler, Mapping) else "bf16"
