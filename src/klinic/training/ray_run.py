"""The Ray session and worker pools of a run with several processes."""

import tempfile
from collections import deque
from contextlib import ExitStack
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from klinic.cluster.placement import LEARNER, REWARDS, SAMPLER, WorkerPlacement, worker_placements
from klinic.cluster.session import open_session
from klinic.errors import ConfigError
from klinic.evidence.rollout import Rollout
from klinic.model.adapters import has_adapter
from klinic.model.loading import Policy
from klinic.model.policy_source import WeightSource
from klinic.recipe.recipe import Recipe
from klinic.rewards.scores import StepRewards, concat_scores
from klinic.runtime.cleanup_process import start_cleanup_process
from klinic.sampler.protocol import Sampler
from klinic.sampler.vllm.sync_check import SyncProbe
from klinic.sampler.weight_group import ram_disk
from klinic.training.build_engine import engine_dtype
from klinic.training.run_folder import ENGINE_LOG

if TYPE_CHECKING:
    from klinic.cluster.worker_pool import WorkerPool

WORKER_MODULE = "klinic.training.ray_workers"  # module with the worker factories


class RayWorkers:
    """The worker processes of a run: samplers, learner ranks, reward functions."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        if recipe.cluster is None:
            raise ValueError("this recipe has no cluster")
        self.section = recipe.cluster
        self.messages: deque[str] = deque()
        """Messages about lost and replaced workers that the run has not logged yet."""
        self._worker_arguments = {"recipe": recipe.explicit_values()}
        self._folder = folder
        self._reward_pool: WorkerPool | None = None
        self._slots = worker_placements(recipe, gpus=torch.cuda.is_available())
        cpus = sum(slot.cpus for slot in self._slots)
        gpus = sum(slot.gpus for slot in self._slots)
        if self.section.address is None:
            _refuse_missing_gpus(recipe, gpus)
        with ExitStack() as cleanup:
            ray = open_session(self.section.address, num_cpus=cpus, num_gpus=gpus)
            self._session = cleanup.enter_context(ray)
            files = tempfile.TemporaryDirectory(prefix="klinic-cluster-", dir=ram_disk())
            self._transfer_folder = Path(cleanup.enter_context(files))
            start_cleanup_process(folders=[self._transfer_folder])
            self._reserve_resources()
            self._exit_stack = cleanup.pop_all()

    def _reserve_resources(self) -> None:
        """Reserve resources for every process; set the device of the driver's learner rank."""
        from klinic.cluster.reservation import driver_gpu_index, reserve_resources

        self._placement_group = reserve_resources(self._slots, self._session, self.section.address)
        index = driver_gpu_index(self._slots, self._placement_group)
        self.learner_device = torch.device("cpu") if index is None else torch.device("cuda", index)
        """Device of learner rank 0, in this process; no worker has it."""

    def make_sampler(
        self, recipe: Recipe, policy: Policy, source: WeightSource, start: str
    ) -> Sampler:
        """Return a sampler that spreads prompts over all sampler workers.

        They start from the model in `start`, and get their weights from `source`.
        """
        from klinic.cluster.samplers import EngineSync, PooledSampler

        def worker_arguments(slot: WorkerPlacement) -> dict[str, Any]:
            log = self._folder / f"{Path(ENGINE_LOG).stem}-{slot.number}.log"
            return {**self._worker_arguments, "where": start, "log": str(log)}

        pool = self._start_pool(SAMPLER, "host_sampler", worker_arguments)
        engines = None
        if recipe.sampler.type == "vllm":
            dtype = getattr(torch, engine_dtype(recipe))
            engines = EngineSync(
                dtype=None if has_adapter(policy.lm) else dtype, probe=SyncProbe(policy)
            )
        return PooledSampler(pool, source, self._session, self._transfer_folder, engines=engines)

    def learner_processes(self, store_name: str) -> Any:
        """Return the other ranks of the learner."""
        from klinic.cluster.learners import RayLearnerWorkers

        pool = self._start_pool(LEARNER, "LearnerWorker", lambda _: {}, replaces=False)
        return RayLearnerWorkers(
            pool,
            self._session,
            self._transfer_folder,
            store_name=store_name,
            device_index=self.learner_device.index,
        )

    def score_rollouts(self, rollouts: list[Rollout]) -> StepRewards:
        """Return the rewards of rollouts, computed by the reward workers."""
        from klinic.cluster.worker_pool import map_over_pool, split_evenly

        if self._reward_pool is None:
            self._reward_pool = self._start_pool(
                REWARDS, "RewardWorker", lambda _: self._worker_arguments
            )
        # a reward function may compare the completions of a prompt: groups stay together
        by_prompt = [list(group) for _, group in groupby(rollouts, lambda r: r.prompt.index)]
        shares = [
            list(chain(*groups)) for groups in split_evenly(by_prompt, self._reward_pool.size)
        ]
        return concat_scores(
            map_over_pool(
                self._reward_pool, "score", shares, available=self._reward_pool.wait_ready
            )
        )

    def close(self) -> None:
        """Stop all workers that this run started."""
        self._exit_stack.close()

    def _start_pool(self, kind: str, factory: str, arguments: Any, *, replaces: bool = True) -> Any:
        from klinic.cluster.worker_pool import WorkerPool

        return WorkerPool(
            [slot for slot in self._slots if slot.kind == kind],
            self._placement_group,
            builder=f"{WORKER_MODULE}:{factory}",
            build_arguments=arguments,
            report_event=self.messages.append,
            replaces=replaces,
        )


def _refuse_missing_gpus(recipe: Recipe, num_needed: int) -> None:
    """Refuse more processes with a GPU than this machine has GPUs: Ray does not count them."""
    num_gpus = torch.cuda.device_count()
    if num_needed > num_gpus and recipe.cluster is not None:
        raise ConfigError(
            f"cluster needs {num_needed} GPUs, one for each of {recipe.learner.num_ranks} learners "
            f"(learner.shards x learner.replicas) and {recipe.sampler.tensor_parallel_size} "
            f"(sampler.tensor_parallel_size) for each of {recipe.cluster.samplers} samplers "
            f"(cluster.samplers), but this machine has {num_gpus}. Lower one of them, or set "
            "cluster.address to a Ray with more."
        )
