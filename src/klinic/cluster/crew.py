"""A pool of Ray workers of one kind: health checks, restart of dead or hung workers."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from klinic.cluster.placement import Place
from klinic.cluster.worker import worker
from klinic.errors import WorkerLostError, first_line

LOOK_EVERY = 0.5  # seconds between health checks
SILENCE = 20.0  # seconds without a heartbeat after which a hung process is killed
LONGEST_START = 600.0  # seconds for a process to start and load the largest model
FAREWELL = 20.0  # seconds that a process has to exit
MOST_LOST = 10  # consecutive workers lost without a completed call
GONE = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError)

News = Callable[[str], None]


class MemberLostError(Exception):
    """The worker died before it replied; resubmit to another."""


@dataclass(eq=False)
class Member:
    """The driver's handle of one worker."""

    handle: Any
    place: Place
    built: Any
    """Ray reference of the pending `build` call."""
    is_ready: bool = False
    pid: int | None = None
    node: str = ""
    pulse: Any = None
    asked_at: float = 0.0

    def end(self) -> None:
        """Kill the process, also one that is stopped and does not respond to Ray."""
        with suppress(Exception):
            ray.kill(self.handle, no_restart=True)
        if self.pid is not None and self.node == ray.get_runtime_context().get_node_id():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Crew:
    """A pool with one worker per placement, all of one kind."""

    def __init__(
        self,
        places: Sequence[Place],
        group: PlacementGroup,
        *,
        maker: str,
        told: Callable[[Place], dict[str, Any]],
        news: News,
        replaces: bool = True,
    ) -> None:
        self._group = group
        self._maker = maker
        self._told = told
        self._news = news
        self._replaces = replaces
        self._lost_in_a_row = 0
        self.size = len(places)
        self.members = [self._start(place) for place in places]

    def ready(self, *, num: int = 1) -> list[Member]:
        """Return the workers that have been built; wait until there are `num`."""
        begun = time.monotonic()
        while True:
            for member in list(self.members):
                if not member.is_ready and _is_there(member.built):
                    with suppress(MemberLostError):
                        self.answer(member, member.built)
                        member.is_ready = True
            self.look()
            found = [member for member in self.members if member.is_ready]
            if len(found) >= num:
                return found
            self._refuse_to_wait_in_vain(time.monotonic() - begun)
            time.sleep(LOOK_EVERY)

    def _refuse_to_wait_in_vain(self, seconds: float) -> None:
        """Raise if no worker can start: no Ray node is alive, or the start timed out."""
        if seconds > LONGEST_START or not any(node["Alive"] for node in ray.nodes()):
            kind = self.members[0].place.kind if self.members else "process"
            raise WorkerLostError(
                f"no {kind} has started after {seconds:.0f} seconds: Ray's own processes are dead, "
                "or its resources are exhausted. Continue with --resume."
            )

    def ask(self, member: Member, name: str, *arguments: Any) -> Any:
        """Submit a call to a worker; return the Ray reference of its result."""
        return member.handle.call.options(concurrency_group="work").remote(name, *arguments)

    def tell(self, member: Member, name: str) -> None:
        """Call a method of a busy worker, in its second thread, without waiting."""
        member.handle.call.options(concurrency_group="pulse").remote(name)

    def first(self, refs: Sequence[Any]) -> Any:
        """Return the first reference that completes or whose worker died."""
        while True:
            there, _ = ray.wait(list(refs), num_returns=1, timeout=LOOK_EVERY)
            if there:
                return there[0]
            self.look()

    def answer(self, member: Member, ref: Any) -> Any:
        """Return the result of a call; re-raise the worker's exception."""
        try:
            value = ray.get(ref)
        except GONE as error:
            self.lose(member, f"its process has ended ({_reason(error)})")
            raise MemberLostError from error
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        self._lost_in_a_row = 0
        return value

    def look(self) -> None:
        """Check heartbeats; replace workers that have been silent for too long."""
        now = time.monotonic()
        for member in [member for member in self.members if member.is_ready]:
            if member.pulse is None:
                asked = member.handle.pulse.options(concurrency_group="pulse").remote()
                member.pulse, member.asked_at = asked, now
            elif _is_there(member.pulse):
                with suppress(*GONE):  # `answer` reports the loss
                    member.pid, member.node = ray.get(member.pulse)
                member.pulse = None
            elif now - member.asked_at > SILENCE:
                self.lose(member, f"it has been silent for {SILENCE:.0f} seconds")

    def lose(self, member: Member, why: str) -> None:
        """Kill a worker and start a replacement."""
        if member not in self.members:
            return
        self._lost_in_a_row += 1
        kind, number = member.place.kind, member.place.number + 1
        if self._lost_in_a_row > MOST_LOST:
            raise WorkerLostError(
                f"{MOST_LOST} processes in a row were lost, the last {kind} because {why}."
                " Check the machine's memory. Continue with --resume."
            )
        member.end()
        at = self.members.index(member)
        if self._replaces:
            self.members[at] = self._start(member.place)
        else:
            del self.members[at]
        self._news(f"Lost {kind} {number} of {self.size}: {why}.")

    def close(self, *, after: Sequence[Any] = ()) -> None:
        """Kill all workers, once the calls in `after` are done or timed out."""
        if after:
            ray.wait(list(after), num_returns=len(after), timeout=FAREWELL)
        for member in self.members:
            member.end()

    def _start(self, place: Place) -> Member:
        within = PlacementGroupSchedulingStrategy(self._group)
        room = {"num_cpus": place.cpus, "num_gpus": place.gpus, "scheduling_strategy": within}
        handle = worker(place.kind, **room)
        built = handle.build.options(concurrency_group="work").remote(
            self._maker, self._told(place)
        )
        return Member(handle=handle, place=place, built=built)


def _is_there(ref: Any) -> bool:
    there, _ = ray.wait([ref], timeout=0)
    return bool(there)


def _reason(error: Exception) -> str:
    told = getattr(error, "cause", None) or error
    return first_line(told)[:160].rstrip(".")
