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

from klinic.errors import ConfigError, RankLostError
from klinic.learner.fsdp import FsdpLearner, Ranks
from klinic.learner.ranks import Call, GroupWire, Leader, follow
from klinic.loop.assembly import both_pack, identity, learner_settings, start_reference
from klinic.model.determinism import settle_kernels
from klinic.model.loading import Policy, load_policy
from klinic.orphans import PARENT
from klinic.recipe.recipe import Recipe

STORE = "KLINIC_STORE"
"""Environment variable with the rendezvous file of ranks that klinic started."""
PATIENCE = timedelta(days=7)  # other ranks wait while rank 0 samples
FAREWELL = 20  # seconds for a rank to exit after a shutdown
START = "start"


def follows() -> bool:
    """Whether this process is a learner rank above 0."""
    return int(os.environ.get("RANK", "0")) > 0


@runtime_checkable
class Following(Protocol):
    """The other ranks of a learner."""

    def start(self, num: int) -> None:
        """Start `num - 1` ranks that wait for this process."""

    def stop(self) -> None:
        """Wait for the other ranks to exit, then kill the rest."""


@dataclass(slots=True)
class Followers:
    """The ranks started by this process; none under `torchrun`."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    files: ExitStack = field(default_factory=ExitStack)

    def start(self, num: int) -> None:
        """Start `num - 1` ranks that wait for this process."""
        folder = self.files.enter_context(tempfile.TemporaryDirectory(prefix="klinic-ranks-"))
        os.environ[STORE] = str(Path(folder) / "store")
        os.environ |= {"RANK": "0", "WORLD_SIZE": str(num)}
        command = [sys.executable, "-m", "klinic.loop.follow"]
        for rank in range(1, num):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), PARENT: str(os.getpid())}
            env = {**os.environ, **place}
            self.processes.append(subprocess.Popen(command, env=env))  # noqa: S603

    def stop(self) -> None:
        """Wait for the other ranks to exit, then kill the rest."""
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=FAREWELL)
            process.kill()
            process.wait()
        if self.processes:
            for name in (STORE, "RANK", "WORLD_SIZE"):
                os.environ.pop(name, None)
        self.files.close()


class LedLearner(Leader):
    """The rank 0 learner, which shuts down the other ranks when closed."""

    def __init__(self, learner: FsdpLearner, followers: Following) -> None:
        super().__init__(learner, GroupWire())
        self._followers = followers

    def close(self) -> None:
        """Shut down the other ranks; ignore ranks that already exited."""
        with suppress(RankLostError):
            super().close()
        _part(self._followers)


def lead(
    recipe: Recipe, policy: Policy, where: str, followers: Following | None = None
) -> tuple[LedLearner, dict[str, Any]]:
    """Return the sharded learner, and the identity of its reference.

    `policy` stays unsharded: completions are sampled from it. `processes` starts the other ranks;
    by default this process does, unless `torchrun` has.
    """
    with ExitStack() as opened:
        followers = Followers() if followers is None else followers
        opened.callback(_part, followers)
        if "RANK" not in os.environ:
            followers.start(recipe.learner.shards)
        _refuse_other_number(recipe)
        _join(recipe.threads)
        how = {"recipe": recipe.plain(), "where": where}
        GroupWire().send(Call(name=START, arguments=how))
        learner, reference = _build(recipe, where, published=policy)
        opened.pop_all()  # from here on the learner shuts them down
    return LedLearner(learner, followers), reference


def _part(followers: Following) -> None:
    """Leave the process group, and stop the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
    followers.stop()


def follow_leader() -> None:
    """Run a learner rank above 0 until rank 0 stops or dies."""
    settle_kernels()
    torch.use_deterministic_algorithms(mode=True)
    _join(threads=None)
    wire = GroupWire()
    try:
        told = wire.receive().arguments
        recipe = Recipe.model_validate(told["recipe"])
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        learner, _ = _build(recipe, told["where"], published=None)
        follow(learner, wire)
    except RankLostError:
        return  # rank 0 reports the reason, if it is alive
    dist.destroy_process_group()


def _refuse_other_number(recipe: Recipe) -> None:
    size, shards = int(os.environ["WORLD_SIZE"]), recipe.learner.shards
    if size != shards:
        raise ConfigError(
            f"learner.shards is {shards}, but torchrun started {size} processes. Set "
            f"learner.shards={size}, or --nproc-per-node {shards}."
        )


def _join(threads: int | None) -> None:
    """Join the process group."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if threads is None:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // here))
    how: dict[str, Any] = {"init_method": "env://"}
    if store := os.environ.get(STORE):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        how = {"init_method": f"file://{store}", "rank": rank, "world_size": size}
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=PATIENCE, **how)


def _build(
    recipe: Recipe, where: str, *, published: Policy | None
) -> tuple[FsdpLearner, dict[str, Any]]:
    section = recipe.model.model_copy(update={"name": where})
    policy = load_policy(section, temperature=recipe.sampling.temperature, seed=recipe.seed)
    reference = start_reference(recipe, policy, where)
    objective, settings = learner_settings(recipe)
    learner = FsdpLearner(
        policy,
        reference,
        objective=objective,
        settings=replace(settings, packed=both_pack(policy, reference)),
        team=Ranks(),
        published=published,
    )
    return learner, identity(reference)
