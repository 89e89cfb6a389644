"""A sampler backed by a worker pool: each worker has the weights and samples a chunk of prompts.

The driver sends weights to all workers over a separate link, not through Ray or a disk. The link is
reopened when a worker is lost or replaced.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import Tensor

from klinic.cluster.addresses import free_port
from klinic.cluster.crew import Crew, Member, MemberLostError
from klinic.cluster.links import GroupLostError, Link, open_link
from klinic.cluster.session import Session
from klinic.cluster.shares import shared, split
from klinic.evidence.rollout import Prompt, Rollout
from klinic.model.weights import Weights
from klinic.sampler.protocol import Loaded
from klinic.sampler.weight_group import TCP


class SharedSampler:
    """Samples completions with a pool of sampler workers."""

    def __init__(
        self, crew: Crew, tensors: Mapping[str, Tensor], session: Session, files: Path
    ) -> None:
        self._crew = crew
        self._tensors = tensors
        self._session = session
        self._files = files
        self._link: Link | None = None
        self._joined: list[Member] = []
        self._weights: Weights | None = None

    def load(self, weights: Weights) -> Loaded:
        """Send the weights to all workers; return the result with the largest deviation."""
        self._weights = weights
        if self._link is None:
            self._crew.ready(num=self._crew.size)
        return self._deliver()

    def sample(self, prompts: Sequence[Prompt], *, step: int) -> Iterator[list[Rollout]]:
        """Yield the group of each prompt."""
        for groups in self._all("sample", prompts, step):
            yield from groups

    def extend(self, rollouts: Sequence[Rollout], *, step: int) -> list[Rollout]:
        """Continue each rollout after its segments."""
        return [rollout for part in self._all("extend", rollouts, step) for rollout in part]

    def close(self) -> None:
        """End the samplers."""
        self._link = None
        ready = [member for member in self._crew.members if member.is_ready]
        self._crew.close(after=[self._crew.ask(member, "close") for member in ready])

    def _all(self, name: str, items: Sequence[Any], step: int) -> list[Any]:
        # chunks do not depend on which workers are alive, so neither do the completions
        shares = list(split(items, self._crew.size))
        return shared(self._crew, name, shares, step, able=self._able)

    def _able(self) -> list[Member]:
        """Return the workers with the current weights; if none is left, send them to new ones."""
        if not self._living():
            self._deliver()
        return self._living()

    def _living(self) -> list[Member]:
        return [member for member in self._joined if member in self._crew.members]

    def _deliver(self) -> Loaded:
        while True:
            members = self._crew.ready()
            try:
                if members != self._joined:
                    self._meet(members)
                return self._send()
            except (MemberLostError, GroupLostError):
                self._link, self._joined = None, []

    def _meet(self, members: list[Member]) -> None:
        """Open a weight link to these workers."""
        self._link, self._joined = None, []
        size, host = 1 + len(members), self._session.host
        store = str(self._files / "weights")
        if not self._session.alone:
            store = f"{TCP}{host}:{free_port(host)}"
        refs = {
            self._crew.ask(member, "join", store, rank, size): member
            for rank, member in enumerate(members, start=1)
        }
        opened = _beside(lambda: open_link(store, self._tensors, rank=0, size=size))
        self._answers(refs)
        self._link, self._joined = opened.result(), members

    def _send(self) -> Loaded:
        link, tensors, weights = self._link, self._tensors, self._weights
        if link is None:
            raise GroupLostError("there is no link to send weights to")
        if self._session.alone:  # shared memory: write before workers read
            link.send(tensors)
        else:
            _beside(lambda: link.send(tensors))
        refs = {self._crew.ask(member, "load", weights): member for member in self._joined}
        told = self._answers(refs)
        fingerprints = " and ".join(sorted({one.fingerprint for one in told}))
        worst = max((one.answer for one in told), key=_apart)
        return Loaded(fingerprint=fingerprints, answer=worst)

    def _answers(self, refs: dict[Any, Member]) -> list[Any]:
        """Return all results; if a worker is lost, raise after the others have replied."""
        left, told, lost = dict(refs), [], None
        while left:
            ref = self._crew.first(list(left))
            try:
                told.append(self._crew.answer(left.pop(ref), ref))
            except (MemberLostError, GroupLostError) as error:
                lost = error
                self._link = None
                for member in left.values():  # abort their pending receives
                    self._crew.tell(member, "leave")
        if lost is not None:
            raise lost
        return told


def _apart(answer: Mapping[str, Any]) -> float:
    return float(max(answer.get("repeated", 0.0), answer.get("fresh", 0.0)))


def _beside(work: Callable[[], Any]) -> "Future[Any]":
    """Run `work` in a daemon thread: it may block forever on a dead worker."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except RuntimeError as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name="klinic-weights").start()
    return done
