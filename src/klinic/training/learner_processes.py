"""Starts the processes of a sharded learner and builds each rank.

`klinic train` with `learner.shards` above 1 starts the other ranks itself, on this machine, over
the loopback interface alone. Under `torchrun` all ranks exist already, on one or more machines.
Rank 0 broadcasts each learner call; the other ranks execute it.
"""

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from klinic.errors import ConfigError, RankLostError
from klinic.learner.fsdp import FsdpLearner, TorchProcessGroup, shard_scorer
from klinic.learner.rpc import BroadcastChannel, Call, Rank0Learner, serve_calls
from klinic.learner.shard_loading import load_policy_shards, load_reference_shards
from klinic.model.adapters import has_adapter
from klinic.model.determinism import initialize_vml_kernels, use_deterministic_kernels
from klinic.model.loading import Policy, load_policy, load_scorer
from klinic.model.reference import (
    Reference,
    adapter_reference,
    make_reference,
)
from klinic.model.start_digests import StartDigests
from klinic.model.weights import digest
from klinic.recipe.recipe import Recipe
from klinic.runtime.freed_memory import freed_memory_returned
from klinic.runtime.process_tree import PARENT_PID_VARIABLE
from klinic.training.build import (
    FrozenIdentities,
    StartedLearner,
    can_pack_rows,
    frozen_identities,
    learner_settings,
    start_reference,
    start_teacher,
)
from klinic.training.sharded_sampler import COMPLETE, complete_rank_turns

STORE_VARIABLE = "KLINIC_STORE"
"""Environment variable with the rendezvous file of ranks that klinic started."""
RANK_0_READY = "klinic_rank_0_ready"
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Time limit of one collective, gloo's and NCCL's: a rank that does not join it by then hangs."""
IDLE_TIMEOUT = timedelta(days=365)  # ranks wait for a call while rank 0 samples or evaluates
EXIT_TIMEOUT = 20  # seconds for a rank to exit after a shutdown
START_CALL = "start"


def is_worker_rank() -> bool:
    """Whether this process is a learner rank above 0."""
    return int(os.environ.get("RANK", "0")) > 0


@runtime_checkable
class LearnerProcesses(Protocol):
    """The other ranks of a learner."""

    def start(self, num: int) -> None:
        """Start `num - 1` ranks that wait for this process."""

    def stop(self) -> None:
        """Wait for the other ranks to exit, then kill the rest."""


@dataclass(slots=True)
class LocalLearnerProcesses:
    """The ranks started by this process; none under `torchrun`."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    files: ExitStack = field(default_factory=ExitStack)

    def start(self, num: int) -> None:
        """Start `num - 1` ranks that wait for this process."""
        folder = self.files.enter_context(tempfile.TemporaryDirectory(prefix="klinic-ranks-"))
        os.environ[STORE_VARIABLE] = str(Path(folder) / "store")
        os.environ |= {"RANK": "0", "WORLD_SIZE": str(num)}
        command = [sys.executable, "-m", "klinic.training.learner_process"]
        for rank in range(1, num):
            rank_environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                PARENT_PID_VARIABLE: str(os.getpid()),
            }
            env = {**os.environ, **rank_environment}
            self.processes.append(subprocess.Popen(command, env=env))  # noqa: S603

    def stop(self) -> None:
        """Wait for the other ranks to exit, then kill the rest."""
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=EXIT_TIMEOUT)
            process.kill()
            process.wait()
        if self.processes:
            for name in (STORE_VARIABLE, "RANK", "WORLD_SIZE"):
                os.environ.pop(name, None)
        self.files.close()


class ShardedLearner(Rank0Learner):
    """The rank 0 learner, which shuts down the other ranks when closed."""

    def __init__(
        self, learner: FsdpLearner, channel: BroadcastChannel, processes: LearnerProcesses
    ) -> None:
        super().__init__(learner, channel)
        self._processes = processes

    def close(self) -> None:
        """Shut down the other ranks; ignore ranks that already exited."""
        with suppress(RankLostError):
            super().close()
        _leave_group(self._processes)


def start_sharded_learner(
    recipe: Recipe,
    weights_source: str,
    *,
    tokenizer: Any = None,
    processes: LearnerProcesses | None = None,
) -> StartedLearner:
    """Return the sharded learner.

    `tokenizer` replaces that of the model's folder. `processes` starts the other ranks; by default
    this process does, unless `torchrun` has.
    """
    with ExitStack() as cleanup:
        processes = LocalLearnerProcesses() if processes is None else processes
        cleanup.callback(_leave_group, processes)
        if "RANK" not in os.environ:
            processes.start(recipe.learner.num_ranks)
        _refuse_other_world_size(recipe)
        _join_process_group(recipe.threads)
        channel = open_call_channel()
        start_arguments = {"recipe": recipe.explicit_values(), "where": weights_source}
        channel.send(Call(name=START_CALL, arguments=start_arguments))
        learner, digests, frozen = build_sharded_learner(
            recipe, weights_source, tokenizer=tokenizer
        )
        cleanup.pop_all()  # from here on the learner shuts them down
    return StartedLearner(
        learner=ShardedLearner(learner, channel, processes),
        policy=learner.policy,
        digests=digests,
        frozen=frozen,
    )


def _leave_group(processes: LearnerProcesses) -> None:
    """Leave the process group, and stop the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
    processes.stop()


def run_learner_rank() -> None:
    """Run a learner rank above 0 until rank 0 stops or dies."""
    initialize_vml_kernels()
    use_deterministic_kernels()
    _join_process_group(threads=None)
    channel = open_call_channel()
    try:
        start_arguments = channel.receive().arguments
        recipe = Recipe.model_validate(start_arguments["recipe"])
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        learner, *_ = build_sharded_learner(recipe, start_arguments["where"])
        serve_calls(learner, channel, {COMPLETE: complete_rank_turns})
    except RankLostError:
        return  # rank 0 reports the reason, if it is alive
    dist.destroy_process_group()


def _refuse_other_world_size(recipe: Recipe) -> None:
    size, num_ranks = int(os.environ["WORLD_SIZE"]), recipe.learner.num_ranks
    if size != num_ranks:
        raise ConfigError(
            f"learner.shards x learner.replicas is {num_ranks}, but torchrun started {size} "
            f"processes. Set learner.shards={size} and learner.replicas=1, or start {num_ranks}."
        )


def _join_process_group(threads: int | None, timeout: timedelta = COLLECTIVE_TIMEOUT) -> None:
    """Join the process group; `timeout` limits each of its collectives."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if threads is None:
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world_size))
    url = "env://"
    if path := os.environ.get(STORE_VARIABLE):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        url = f"file://{path}"
    store, _, _ = next(rendezvous(url, rank, size, timeout=IDLE_TIMEOUT))
    # under torchrun the other ranks start with rank 0, which may download and warm up for hours
    if rank == 0:
        store.set(RANK_0_READY, b"1")
    else:
        store.wait([RANK_0_READY], IDLE_TIMEOUT)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        timeout=timeout,
        store=PrefixStore("klinic", store),
        rank=rank,
        world_size=size,
    )


def open_call_channel(timeout: timedelta = COLLECTIVE_TIMEOUT) -> BroadcastChannel:
    """Return the channel of calls; ranks may wait for one for any time, rank 0 for no rank."""
    limit = timeout if dist.get_rank() == 0 else IDLE_TIMEOUT
    return BroadcastChannel(dist.new_group(backend="gloo", timeout=limit))


@freed_memory_returned()
def build_sharded_learner(
    recipe: Recipe, weights_source: str, *, tokenizer: Any = None
) -> tuple[FsdpLearner, StartDigests, FrozenIdentities]:
    """Return this rank's part of the learner, and the identities of its models."""
    # sharding moves it; a whole copy may not fit on one device
    section = recipe.model.model_copy(update={"name": weights_source, "device": "cpu"})
    group = TorchProcessGroup(replicas=recipe.learner.replicas)
    kl = recipe.kl
    needs_reference = kl is not None and kl.needs_reference
    policy = load_policy_shards(
        section,
        temperature=recipe.sampling.temperature,
        seed=recipe.seed,
        mesh=group.mesh,
        copies_start=needs_reference and recipe.reference.path is None,
        tokenizer=tokenizer,
    )
    if policy is None:
        temperature = recipe.sampling.temperature
        policy = load_policy(
            section, temperature=temperature, seed=recipe.seed, tokenizer=tokenizer
        )
        digests = StartDigests(policy.lm)
        reference = start_reference(recipe, policy, weights_source, digests)
    else:
        digests = StartDigests(policy.lm)
        reference = _sharded_reference(recipe, policy, digests, group) if needs_reference else None
    _ = digests.policy  # while all ranks are here, and before the policy moves
    teacher = start_teacher(recipe, policy, digests)
    objective, settings = learner_settings(recipe)
    learner = FsdpLearner(
        policy,
        reference,
        objective=objective,
        settings=replace(settings, packed=can_pack_rows(policy, reference, teacher)),
        group=group,
        teacher=teacher,
    )
    return learner, digests, frozen_identities(reference, teacher)


def _sharded_reference(
    recipe: Recipe, policy: Policy, digests: StartDigests, group: TorchProcessGroup
) -> Reference:
    """Return the reference of a sharded policy; a separate model is loaded shard by shard too."""
    source = recipe.reference.path or policy.name
    if recipe.reference.path is None and has_adapter(policy.lm):
        return adapter_reference(policy.scorer, source=source, digests=digests)
    scorer = load_reference_shards(source, like=policy, mesh=group.mesh)
    if scorer is None:
        scorer = load_scorer(source, like=policy, seed=recipe.seed)
        shard_scorer(scorer, group.mesh)
    if recipe.reference.path is None:
        return make_reference(scorer, source=source, weights_digest=digests.policy)
    return make_reference(scorer, source=source, weights_digest=digest(scorer.lm.state_dict()))
