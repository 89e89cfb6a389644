"""Reserves the resources of every process of a run in one Ray placement group.

The driver is no Ray worker, so Ray would give its GPU to another process: the group holds a bundle
for it on its own node, and a short task reads which GPU Ray took for that bundle.
"""

import os
from collections.abc import Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from klinic.cluster.placement import DRIVER, WorkerPlacement
from klinic.cluster.session import RaySession
from klinic.errors import ConfigError

PLACEMENT_TIMEOUT = 120.0  # seconds to wait for resources of a shared cluster
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def reserve_resources(
    placements: Sequence[WorkerPlacement], session: RaySession, address: str | None
) -> PlacementGroup:
    """Reserve resources for every process, spread over the nodes; the driver's on its own node."""
    bundles = [_bundle(placement, session) for placement in placements]
    group = placement_group(bundles, strategy="SPREAD")
    if not group.wait(PLACEMENT_TIMEOUT):
        free = {k: v for k, v in ray.available_resources().items() if k in {"CPU", "GPU"}}
        largest = max(
            (one.resource_bundle for one in placements), key=lambda room: sum(room.values())
        )
        raise ConfigError(
            f"cluster needs resources for {len(placements)} processes ({largest} each), but Ray "
            f"at {address} has {free} free. Use fewer processes, set threads lower, or add nodes."
        )
    return group


def _bundle(placement: WorkerPlacement, session: RaySession) -> dict[str, float]:
    bundle = placement.resource_bundle
    if placement.kind == DRIVER and not session.is_local:
        bundle[f"node:{session.host}"] = 0.001  # Ray's name for this node
    return bundle


def driver_gpu_index(placements: Sequence[WorkerPlacement], group: PlacementGroup) -> int | None:
    """Return torch's index of the GPU that is reserved for the driver; None without GPUs."""
    bundles = [placement.bundle for placement in placements if placement.kind == DRIVER]
    if not bundles:
        return None
    within = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundles[0])
    read = ray.remote(num_cpus=0, num_gpus=1, scheduling_strategy=within)(_read_gpu_id)
    return device_index(ray.get(read.remote()), os.environ.get(VISIBLE_GPUS))


def _read_gpu_id() -> str:
    return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])


def device_index(gpu_id: str, visible: str | None) -> int:
    """Return torch's index of a GPU, given the visible ids of the process.

    >>> device_index("5", None), device_index("5", "3,5"), device_index("GPU-a", "GPU-b,GPU-a")
    (5, 1, 1)
    """
    if visible is None:
        return int(gpu_id)
    ids = visible.split(",")
    if gpu_id not in ids:
        raise ConfigError(
            f"Ray reserved GPU {gpu_id} for the first process, whose CUDA_VISIBLE_DEVICES is "
            f"{visible}: it cannot use that GPU. Start Ray and klinic with the same variable."
        )
    return ids.index(gpu_id)
