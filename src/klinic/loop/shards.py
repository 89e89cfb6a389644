"""A learner of several processes: who starts them, and what each of them builds.

`klinic train` with `learner.shards` above 1 starts the others itself, on this machine, and they
talk over the loopback interface alone. Under `torchrun` all are there already, on as many machines
as it was told: the first leads, the others follow.
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
"""A file over which processes that klinic started find one another."""
PATIENCE = timedelta(days=7)  # a follower waits while the leader samples, however long that takes
FAREWELL = 20  # seconds that a follower has to go when told to
START = "start"


def follows() -> bool:
    """Whether this process was started to follow another one."""
    return int(os.environ.get("RANK", "0")) > 0


@runtime_checkable
class Following(Protocol):
    """Processes that share a learner with this one."""

    def start(self, num: int) -> None:
        """Start `num - 1` processes that wait for this one."""

    def stop(self) -> None:
        """Let them go home, and see that they do."""


@dataclass(slots=True)
class Followers:
    """The processes that were started here; none under `torchrun`."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    files: ExitStack = field(default_factory=ExitStack)

    def start(self, num: int) -> None:
        """Start `num - 1` processes that wait for this one."""
        folder = self.files.enter_context(tempfile.TemporaryDirectory(prefix="klinic-ranks-"))
        os.environ[STORE] = str(Path(folder) / "store")
        os.environ |= {"RANK": "0", "WORLD_SIZE": str(num)}
        command = [sys.executable, "-m", "klinic.loop.follow"]
        for rank in range(1, num):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), PARENT: str(os.getpid())}
            env = {**os.environ, **place}
            self.processes.append(subprocess.Popen(command, env=env))  # noqa: S603

    def stop(self) -> None:
        """Let them go home, and see that they do."""
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
    """A leader that sees its followers off."""

    def __init__(self, learner: FsdpLearner, followers: Following) -> None:
        super().__init__(learner, GroupWire())
        self._followers = followers

    def close(self) -> None:
        """Send the others home; one that is gone already need not be told."""
        with suppress(RankLostError):
            super().close()
        _part(self._followers)


def lead(
    recipe: Recipe, policy: Policy, where: str, followers: Following | None = None
) -> tuple[LedLearner, dict[str, Any]]:
    """Return the learner of all processes, and which reference it starts with.

    `policy` stays whole: it is what completions are sampled from. `followers` says who starts the
    others; this process does, or `torchrun` has.
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
        opened.pop_all()  # from here on they are the learner's to send home
    return LedLearner(learner, followers), reference


def _part(followers: Following) -> None:
    """Leave the group, and see the others off."""
    if dist.is_initialized():
        dist.destroy_process_group()
    followers.stop()


def follow_leader() -> None:
    """Be one of the others until the leader says stop, or is gone."""
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
        return  # the leader has said why, or cannot any more
    dist.destroy_process_group()


def _refuse_other_number(recipe: Recipe) -> None:
    size, shards = int(os.environ["WORLD_SIZE"]), recipe.learner.shards
    if size != shards:
        raise ConfigError(
            f"learner.shards is {shards}, and torchrun started {size} processes. Set "
            f"learner.shards={size}, or --nproc-per-node {shards}."
        )


def _join(threads: int | None) -> None:
    """Meet the other processes."""
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
