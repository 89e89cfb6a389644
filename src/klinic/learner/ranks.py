"""One process leads, the others follow: whatever the leader asks of its learner, all of them do.

The leader runs the loop: it samples, asks for rewards, decides and tells. A follower only waits for
the next call. Calls go out as JSON, records as Arrow, over the process group: nothing is pickled.
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
    """What the leader wants done."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    record: StepRecord | None = None


@runtime_checkable
class Wire(Protocol):
    """How calls go from the leader to the others."""

    def send(self, call: Call) -> None:
        """Tell everybody."""

    def receive(self) -> Call:
        """Wait for the next call."""


class GroupWire:
    """Calls over the process group, from rank 0."""

    def send(self, call: Call) -> None:
        """Tell everybody."""
        step = None if call.record is None else call.record.step
        head = json.dumps({"name": call.name, "arguments": call.arguments, "step": step}).encode()
        body = b"" if call.record is None else _packed(call.record)
        sizes = torch.tensor([len(head), len(body)])
        data = np.frombuffer(head + body, dtype=np.uint8).copy()
        _broadcast(sizes)
        _broadcast(torch.from_numpy(data))

    def receive(self) -> Call:
        """Wait for the next call."""
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
    """Return the error for a process that is no longer there."""
    first = first_line(error)[:160]
    return RankLostError(
        f"another process of this learner is gone, or out of step with this one ({first}). What it "
        "said is above. Nothing is lost but the steps since the newest checkpoint: go on with "
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
    return from_table(table, step=step, facts={}, source="the leader")


class Leader:
    """The learner as the loop sees it: every call is made by all processes."""

    def __init__(self, learner: FsdpLearner, wire: Wire) -> None:
        self._learner = learner
        self._wire = wire
        self._parts = PartWriter(learner.team)

    def _all(self, call: Call, own: Callable[[], Any]) -> Any:
        """Let everybody do something, and do it here; return what came of it here.

        What fails here alone leaves the others in the middle of it, and there is no way back.
        """
        self._wire.send(call)
        try:
            return own()
        except KlinicError:
            raise
        except Exception as error:
            raise lost(error) from error

    def publish(self) -> Weights:
        """Bring the whole weights up to date in this process, and say which they are."""
        published: Weights = self._all(Call(name="publish"), self._learner.publish)
        return published

    def score(self, record: StepRecord, *, needs_reference: bool) -> Scored:
        """Score a batch with the policy and the reference as they stand before its updates."""
        how = {"needs_reference": needs_reference}
        scored: Scored = self._all(
            Call(name="score", arguments=how, record=record),
            lambda: self._learner.score(record, **how),
        )
        return scored

    def prepare(self, scored: Scored, *, kl_coef: float, reward_scale: float = 1.0) -> Prepared:
        """Compute the loss and its gradient, of the batch that was scored last."""
        how = {"kl_coef": kl_coef, "reward_scale": reward_scale}
        prepared: Prepared = self._all(
            Call(name="prepare", arguments=how), lambda: self._learner.prepare(scored, **how)
        )
        return prepared

    def commit(self, *, lr_factor: float = 1.0) -> dict[str, float]:
        """Make the update that was prepared, at the scheduled rate times a factor."""
        how = {"lr_factor": lr_factor}
        told: dict[str, float] = self._all(
            Call(name="commit", arguments=how), lambda: self._learner.commit(**how)
        )
        return told

    def sound(self) -> dict[str, bool]:
        """Whether all weights, and all moments of the optimiser, are numbers."""
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
        """Answer what records do not tell, about some completions of a step."""
        some, how = first_rows(record, ROWS), {"kl_coef": kl_coef}
        told: dict[str, dict[str, Any]] = self._all(
            Call(name="probe", arguments=how, record=some),
            lambda: self._learner.probe(some, **how),
        )
        return told

    def discard(self) -> None:
        """Drop the gradient that was prepared."""
        self._all(Call(name="discard"), self._learner.discard)

    def move_reference(
        self, step: int, *, keep: float, forget_moments: bool
    ) -> dict[str, Any] | None:
        """Leave the reference where it is: a recipe with shards has none that moves."""
        del step, keep, forget_moments
        return None

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the shards, and the whole model; return the rest of the state."""
        told = {"folder": str(folder.resolve())}
        state: dict[str, Any] = self._all(
            Call(name="save", arguments=told), lambda: self._learner.save(folder)
        )
        return state

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Go back to what `save` wrote."""
        told = {"folder": str(folder.resolve()), "state": state}
        self._all(Call(name="load", arguments=told), lambda: self._learner.load(folder, state))

    def records(self, run: Path) -> Records:
        """Let every process write its share of each record."""
        return RankedRecords(run, self)

    def write_record(self, run: Path, record: StepRecord) -> None:
        """Let every process write its rows of the step, beside what it does next."""
        told = {"run": str(run.resolve())}
        self._all(Call(name="write", arguments=told), lambda: self._parts.put(run, record))

    def flush_records(self) -> None:
        """Wait until every record is written by everybody."""
        self._all(Call(name="flush"), self._parts.flush)

    def close(self) -> None:
        """Send the others home."""
        self._wire.send(Call(name=STOP))


class RankedRecords:
    """The records of a run, written by all processes."""

    def __init__(self, run: Path, leader: Leader) -> None:
        self._run, self._leader = run, leader

    def put(self, record: StepRecord) -> None:
        """Hand over a record; what the others hold of it is theirs to write."""
        self._leader.write_record(self._run, record)

    def flush(self) -> None:
        """Wait until every record that was put is written."""
        self._leader.flush_records()

    def __enter__(self) -> "RankedRecords":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not issubclass(kind, RankLostError):
            self.flush()


def follow(learner: FsdpLearner, wire: Wire) -> None:
    """Do what the leader does until it says stop."""
    follower = _Follower(learner)
    while True:
        call = wire.receive()
        if call.name == STOP:
            return
        follower.do(call)


class _Follower:
    """What a follower does for each call; what comes of it is the leader's to tell."""

    def __init__(self, learner: FsdpLearner) -> None:
        self._learner = learner
        self._parts = PartWriter(learner.team)
        self._scored: Scored | None = None
        self._first: StepRecord | None = None

    def do(self, call: Call) -> None:
        """Do one thing."""
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
        assert self._scored is not None  # noqa: S101 - the leader scores first
        prepared = self._learner.prepare(self._scored, kl_coef=kl_coef, reward_scale=reward_scale)
        self._first = self._first or prepared.record

    def _rescore(self) -> None:
        assert self._scored is not None  # noqa: S101 - the leader scores first
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
