"""Rank 0 broadcasts each learner call; every rank executes it.

Rank 0 runs the loop: sampling, rewards, decisions and logging. The other ranks wait for the next
call. Calls are sent as JSON and records as Arrow over the process group: nothing is pickled.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from klinic.errors import KlinicError, RankLostError, first_line
from klinic.evidence.columns import from_table, to_table
from klinic.evidence.record import StepRecord
from klinic.evidence.rows import first_rows
from klinic.learner.fsdp import FsdpLearner
from klinic.learner.local import Scored
from klinic.learner.protocol import Prepared, Records
from klinic.learner.questions import ROWS
from klinic.learner.rank_records import PartWriter
from klinic.model.weights import Weights

STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A learner call that every rank executes."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    record: StepRecord | None = None


@runtime_checkable
class Wire(Protocol):
    """A channel that carries calls from rank 0 to the other ranks."""

    def send(self, call: Call) -> None:
        """Send a call to every other rank."""

    def receive(self) -> Call:
        """Block until the next call."""


class GroupWire:
    """Broadcasts calls from rank 0 over the process group."""

    def send(self, call: Call) -> None:
        """Send a call to every other rank."""
        step = None if call.record is None else call.record.step
        head = json.dumps({"name": call.name, "arguments": call.arguments, "step": step}).encode()
        body = b"" if call.record is None else _packed(call.record)
        sizes = torch.tensor([len(head), len(body)])
        data = np.frombuffer(head + body, dtype=np.uint8).copy()
        _broadcast(sizes)
        _broadcast(torch.from_numpy(data))

    def receive(self) -> Call:
        """Block until the next call."""
        sizes = torch.zeros(2, dtype=torch.int64)
        _broadcast(sizes)
        data = torch.empty(int(sizes.sum()), dtype=torch.uint8)
        _broadcast(data)
        content = data.numpy().tobytes()
        head = json.loads(content[: int(sizes[0])])
        body = content[int(sizes[0]) :]
        record = _unpacked(body, head["step"]) if body else None
        return Call(name=head["name"], arguments=head["arguments"], record=record)


def _broadcast(tensor: torch.Tensor) -> None:
    try:
        dist.broadcast(tensor, src=0)
    except RuntimeError as error:
        raise lost(error) from error


def lost(error: BaseException) -> RankLostError:
    """Return the error for a rank that exited or is out of sync."""
    first = first_line(error)[:160]
    return RankLostError(
        f"another rank of this learner exited, or is out of sync with this one ({first}). Its "
        "output is above. Only the steps since the newest checkpoint are lost: continue with "
        "--resume."
    )


def _packed(record: StepRecord) -> bytes:
    sink = pa.BufferOutputStream()
    table = to_table(record)
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


def _unpacked(data: bytes, step: int) -> StepRecord:
    table = pa.ipc.open_stream(data).read_all()
    return from_table(table, step=step, facts={}, source="rank 0")


class Leader:
    """The learner on rank 0: every call is executed by all ranks."""

    def __init__(self, learner: FsdpLearner, wire: Wire) -> None:
        self._learner = learner
        self._wire = wire
        self._parts = PartWriter(learner.team)

    def _all(self, call: Call, own: Callable[[], Any]) -> Any:
        """Broadcast a call, execute it here and return the local result.

        An error on this rank alone leaves the other ranks inside the call, which is unrecoverable.
        """
        self._wire.send(call)
        try:
            return own()
        except KlinicError:
            raise
        except Exception as error:
            raise lost(error) from error

    def publish(self) -> Weights:
        """Gather the full weights into this process; return their identity."""
        published: Weights = self._all(Call(name="publish"), self._learner.publish)
        return published

    def score(self, record: StepRecord, *, needs_reference: bool) -> Scored:
        """Score a batch with policy and reference before its updates."""
        how = {"needs_reference": needs_reference}
        scored: Scored = self._all(
            Call(name="score", arguments=how, record=record),
            lambda: self._learner.score(record, **how),
        )
        return scored

    def prepare(self, scored: Scored, *, kl_coef: float, reward_scale: float = 1.0) -> Prepared:
        """Compute the loss and its gradient for the batch that was scored last."""
        how = {"kl_coef": kl_coef, "reward_scale": reward_scale}
        prepared: Prepared = self._all(
            Call(name="prepare", arguments=how), lambda: self._learner.prepare(scored, **how)
        )
        return prepared

    def commit(self, *, lr_factor: float = 1.0) -> dict[str, float]:
        """Apply the prepared update at the scheduled learning rate times a factor."""
        how = {"lr_factor": lr_factor}
        told: dict[str, float] = self._all(
            Call(name="commit", arguments=how), lambda: self._learner.commit(**how)
        )
        return told

    def sound(self) -> dict[str, bool]:
        """Whether all weights and optimizer moments are finite."""
        told: dict[str, bool] = self._all(Call(name="sound"), self._learner.sound)
        return told

    def update_kl(self, scored: Scored, before: StepRecord) -> float:
        """Return KL(new || old) in nats per token, after the updates of a batch."""
        own = partial(self._learner.update_kl, scored, before)
        return float(self._all(Call(name="rescore"), own))

    def sequence_kl(self, scored: Scored) -> np.ndarray | None:
        """Return k1 to the reference summed over each completion; None without a reference."""
        return self._learner.sequence_kl(scored)

    def probe(self, record: StepRecord, *, kl_coef: float) -> dict[str, dict[str, Any]]:
        """Run the active probes on some completions of a step."""
        some, how = first_rows(record, ROWS), {"kl_coef": kl_coef}
        told: dict[str, dict[str, Any]] = self._all(
            Call(name="probe", arguments=how, record=some),
            lambda: self._learner.probe(some, **how),
        )
        return told

    def discard(self) -> None:
        """Drop the prepared gradient."""
        self._all(Call(name="discard"), self._learner.discard)

    def move_reference(
        self, step: int, *, keep: float, forget_moments: bool
    ) -> dict[str, Any] | None:
        """Do nothing: a recipe with shards has no moving reference."""
        del step, keep, forget_moments
        return None

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the shards and the full model; return the remaining state."""
        told = {"folder": str(folder.resolve())}
        state: dict[str, Any] = self._all(
            Call(name="save", arguments=told), lambda: self._learner.save(folder)
        )
        return state

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Restore a checkpoint written by `save`."""
        told = {"folder": str(folder.resolve()), "state": state}
        self._all(Call(name="load", arguments=told), lambda: self._learner.load(folder, state))

    def records(self, run: Path) -> Records:
        """Return a writer through which every rank writes its rows of each record."""
        return RankedRecords(run, self)

    def write_record(self, run: Path, record: StepRecord) -> None:
        """Let every rank write its rows of the step in the background."""
        told = {"run": str(run.resolve())}
        self._all(Call(name="write", arguments=told), lambda: self._parts.put(run, record))

    def flush_records(self) -> None:
        """Block until every rank has written every record."""
        self._all(Call(name="flush"), self._parts.flush)

    def close(self) -> None:
        """Shut down the other ranks."""
        self._wire.send(Call(name=STOP))


class RankedRecords:
    """The records of a run, written by all ranks."""

    def __init__(self, run: Path, leader: Leader) -> None:
        self._run, self._leader = run, leader

    def put(self, record: StepRecord) -> None:
        """Enqueue a record; every rank writes its own rows."""
        self._leader.write_record(self._run, record)

    def flush(self) -> None:
        """Block until every enqueued record is written."""
        self._leader.flush_records()

    def __enter__(self) -> "RankedRecords":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not issubclass(kind, RankLostError):
            self.flush()


def follow(learner: FsdpLearner, wire: Wire) -> None:
    """Execute calls from rank 0 until it sends stop."""
    follower = _Follower(learner)
    while True:
        call = wire.receive()
        if call.name == STOP:
            return
        follower.do(call)


class _Follower:
    """Executes calls on a rank other than 0; results are discarded."""

    def __init__(self, learner: FsdpLearner) -> None:
        self._learner = learner
        self._parts = PartWriter(learner.team)
        self._scored: Scored | None = None
        self._first: StepRecord | None = None

    def do(self, call: Call) -> None:
        """Execute one call."""
        if call.record is not None:
            getattr(self, f"_{call.name}")(call.record, **call.arguments)
        elif hasattr(self, f"_{call.name}"):
            getattr(self, f"_{call.name}")(**call.arguments)
        else:
            getattr(self._learner, call.name)(**call.arguments)

    def _score(self, record: StepRecord, *, needs_reference: bool) -> None:
        self._scored = self._learner.score(record, needs_reference=needs_reference)
        self._first = None

    def _prepare(self, *, kl_coef: float, reward_scale: float) -> None:
        assert self._scored is not None  # noqa: S101 - rank 0 scores first
        prepared = self._learner.prepare(self._scored, kl_coef=kl_coef, reward_scale=reward_scale)
        self._first = self._first or prepared.record

    def _rescore(self) -> None:
        assert self._scored is not None  # noqa: S101 - rank 0 scores first
        self._learner.rescore(self._scored)

    def _probe(self, record: StepRecord, *, kl_coef: float) -> None:
        self._learner.probe(record, kl_coef=kl_coef)

    def _save(self, *, folder: str) -> None:
        self._learner.save(Path(folder))

    def _load(self, *, folder: str, state: dict[str, Any]) -> None:
        self._learner.load(Path(folder), state)

    def _write(self, *, run: str) -> None:
        assert self._first is not None  # noqa: S101 - a step was prepared
        self._parts.put(Path(run), self._first)

    def _flush(self) -> None:
        self._parts.flush()
