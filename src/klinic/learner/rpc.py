"""Rank 0 broadcasts each learner call; every rank executes it.

Rank 0 runs the loop: sampling, rewards, decisions and logging. The other ranks wait for the next
call. Calls are sent as JSON and rows as Arrow over the process group: nothing is pickled. A rank
receives the rows that it computes; only the few rows of a probe go to all ranks.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float

from klinic.errors import KlinicError, RankLostError, first_line
from klinic.evidence.columns import from_table, to_table
from klinic.evidence.measures import ClipRange
from klinic.evidence.record import ProbeResult, StepRecord, first_rows
from klinic.evidence.step_sample import num_sampled_rows
from klinic.learner.fsdp import FsdpLearner
from klinic.learner.probes import NUM_PROBED_ROWS
from klinic.learner.protocol import LearnerState, LossScales, PreparedUpdate, RecordSink
from klinic.learner.rank_batch import RankBatch
from klinic.learner.row_shares import (
    RowShare,
    decode_share,
    decode_table,
    encode_share,
    encode_table,
    share_of_rank,
)
from klinic.learner.scored_batch import ScoredBatch
from klinic.model.loading import Policy
from klinic.model.moving_reference import MovingReferenceIdentity
from klinic.model.policy_source import CompletionIds, PromptIds
from klinic.model.weight_stream import WeightStream
from klinic.model.weights import Weights

STOP = "stop"
TIMED_OUT = re.compile(r"Timed out[^.]*")  # gloo's error has no type of its own

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A learner call that every rank executes."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    record: StepRecord | None = None
    """Rows for every rank."""
    shares: Callable[[int], RowShare] | None = None
    """The rows of each rank, by its number; on a receiver those of its own."""


@runtime_checkable
class CallChannel(Protocol):
    """A channel that carries calls from rank 0 to the other ranks."""

    def send(self, call: Call) -> None:
        """Send a call to every other rank."""

    def receive(self) -> Call:
        """Block until the next call."""


class BroadcastChannel:
    """Broadcasts calls from rank 0 over the process group."""

    def __init__(self, waiting_group: dist.ProcessGroup | None = None) -> None:
        """Take the group in which ranks wait for a call, with its own time limit.

        The rest of a call is broadcast in the default group, like every other collective.
        """
        self._waiting_group = waiting_group

    def send(self, call: Call) -> None:
        """Send a call to every other rank."""
        step = None if call.record is None else call.record.step
        head = json.dumps({"name": call.name, "arguments": call.arguments, "step": step}).encode()
        body = np.zeros(0, np.uint8)
        if call.record is not None:
            body = encode_table(to_table(call.record))
        sizes = torch.tensor([len(head), len(body), call.shares is not None])
        data = np.concatenate([np.frombuffer(head, dtype=np.uint8), body])
        _broadcast(sizes, self._waiting_group)
        _broadcast(torch.from_numpy(data))
        if call.shares is not None:
            for rank in range(1, dist.get_world_size()):
                _send(encode_share(call.shares(rank)), rank)

    def receive(self) -> Call:
        """Block until the next call."""
        sizes = torch.zeros(3, dtype=torch.int64)
        _broadcast(sizes, self._waiting_group)
        data = torch.empty(int(sizes[:2].sum()), dtype=torch.uint8)
        _broadcast(data)
        content = data.numpy().tobytes()
        head = json.loads(content[: int(sizes[0])])
        body = content[int(sizes[0]) :]
        record = _decode_record(body, head["step"]) if body else None
        call = Call(name=head["name"], arguments=head["arguments"], record=record)
        if not sizes[2]:
            return call
        share = decode_share(_receive_from_rank_0())
        return replace(call, shares=lambda _: share)


def _send(content: np.ndarray, rank: int) -> None:
    """Send bytes to one rank, after their number."""
    data = torch.from_numpy(content)
    with _rank_losses():
        dist.send(torch.tensor([len(data)]), rank)
        dist.send(data, rank)


def _receive_from_rank_0() -> np.ndarray:
    size = torch.zeros(1, dtype=torch.int64)
    with _rank_losses():
        dist.recv(size, 0)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(data, 0)
    return data.numpy()


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    with _rank_losses():
        dist.broadcast(tensor, src=0, group=group)


@contextmanager
def _rank_losses() -> Iterator[None]:
    """Raise `RankLostError` for an error of the process group."""
    try:
        yield
    except RuntimeError as error:
        raise rank_lost_error(error) from error


def rank_lost_error(error: BaseException) -> RankLostError:
    """Return the error for a rank that exited, hangs or is out of sync."""
    lost = "Only the steps since the newest checkpoint are lost: continue with --resume."
    if timed_out := _find_timeout(error):
        return RankLostError(
            "another rank of this learner hangs: a collective of all ranks did not complete in "
            f"time ({timed_out}). {lost}"
        )
    return RankLostError(
        "another rank of this learner exited, or is out of sync with this one "
        f"({first_line(error)[:160]}). Its output is above. {lost}"
    )


def _find_timeout(error: BaseException) -> str | None:
    """Return gloo's words about a collective that timed out, without its source path."""
    found = TIMED_OUT.search(first_line(error)[:400])
    return None if found is None else found.group()


def _decode_record(data: bytes, step: int) -> StepRecord:
    return from_table(decode_table(data), step=step, facts={}, source="rank 0")


class Rank0Learner:
    """The learner on rank 0: every call is executed by all ranks."""

    def __init__(self, learner: FsdpLearner, channel: CallChannel) -> None:
        self._learner = learner
        self._channel = channel
        self._batch = RankBatch(learner)
        self._sample: StepRecord | None = None
        self._lock = threading.RLock()  # a thread that prefetches streams weights

    @property
    def policy(self) -> Policy:
        """The policy, with this rank's shards."""
        return self._learner.policy

    def _call_all_ranks(self, call: Call, run_here: Callable[[], ResultT]) -> ResultT:
        """Broadcast a call, execute it here and return the local result.

        An error on this rank alone leaves the other ranks inside the call, which is unrecoverable.
        """
        with self._lock:
            self._channel.send(call)
            try:
                return run_here()
            except KlinicError:
                raise
            except Exception as error:
                raise rank_lost_error(error) from error

    def run_on_ranks(
        self, name: str, arguments: dict[str, Any], run_here: Callable[[FsdpLearner], ResultT]
    ) -> ResultT:
        """Execute a call that the other ranks have a handler for; return the result of this one."""
        call = Call(name=name, arguments=arguments)
        return self._call_all_ranks(call, lambda: run_here(self._learner))

    def publish(self) -> Weights:
        """Return the identity of the current weights."""
        return self._call_all_ranks(Call(name="publish"), self._learner.publish)

    @contextmanager
    def hold_weights(self) -> Iterator[None]:
        """Let no other thread make a call within the context."""
        with self._lock:
            yield

    @contextmanager
    def stream_weights(self, dtype: torch.dtype | None = None) -> Iterator[WeightStream]:
        """Open a stream of the trained weights; the other ranks send their shards."""
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        with self._lock:
            self._channel.send(Call(name="stream_weights", arguments={"dtype": name}))
            with self._learner.stream_weights(dtype) as stream:
                yield stream

    def completion_logits(
        self, prompt: PromptIds, token_ids: CompletionIds, *, adapter: bool = True
    ) -> Float[np.ndarray, "n V"]:
        """Return the logits of each token of a completion, before any temperature."""
        rows = {"prompt": prompt.tolist(), "token_ids": token_ids.tolist()}
        return self._call_all_ranks(
            Call(name="completion_logits", arguments={**rows, "adapter": adapter}),
            lambda: self._learner.completion_logits(prompt, token_ids, adapter=adapter),
        )

    def score(self, record: StepRecord, *, needs_reference: bool) -> ScoredBatch:
        """Score a batch with policy and reference; every rank receives its rows."""
        self._sample = first_rows(record, num_sampled_rows(record))
        row_sets = self._learner.split_rows(record)
        share = partial(share_of_rank, record, row_sets, num_ranks=self._learner.group.size)
        arguments = {"needs_reference": needs_reference}
        return self._call_all_ranks(
            Call(name="score", arguments=arguments, shares=lambda rank: share(rank=rank)),
            lambda: self._batch.score(share(rank=0), needs_reference=needs_reference),
        )

    def prepare(self, scored: ScoredBatch, scales: LossScales) -> PreparedUpdate:
        """Compute the loss and its gradient for the batch that was scored last.

        The record is the sample of the step that the doctor sees; every rank keeps its rows.
        """
        assert self._sample is not None and scored is self._batch.scored  # noqa: S101, PT018
        sample = self._sample
        arguments = {**asdict(scales), "num_rows": sample.num_rows}
        prepared, columns = self._call_all_ranks(
            Call(name="prepare", arguments=arguments),
            lambda: self._batch.prepare(scales, num_rows=sample.num_rows),
        )
        results: dict[str, Any] = {**columns, "facts": prepared.record.facts}
        return replace(prepared, record=replace(sample, **results))

    def commit(self, *, lr_factor: float = 1.0) -> dict[str, float]:
        """Apply the prepared update at the scheduled learning rate times a factor."""
        return self._call_all_ranks(
            Call(name="commit", arguments={"lr_factor": lr_factor}),
            lambda: self._learner.commit(lr_factor=lr_factor),
        )

    def all_finite(self) -> dict[str, bool]:
        """Whether all weights and optimizer moments are finite."""
        return self._call_all_ranks(Call(name="all_finite"), self._learner.all_finite)

    def update_kl(self, scored: ScoredBatch, before: StepRecord) -> float:
        """Return KL(new || old) in nats per token, after the updates of a batch."""
        del scored, before  # each rank has those of its rows
        return self._call_all_ranks(Call(name="update_kl"), self._batch.update_kl)

    def measure(
        self, first: PreparedUpdate, last: PreparedUpdate, *, clip: ClipRange, kl_coef: float
    ) -> dict[str, float]:
        """Return the metrics of the trained tokens of the batch that was scored last."""
        numbers: dict[str, Any] = {"first": first.number, "last": last.number, "kl_coef": kl_coef}
        return self._call_all_ranks(
            Call(name="measure", arguments={**numbers, "clip": asdict(clip)}),
            lambda: self._batch.measure(**numbers, clip=clip),
        )

    def sequence_kl(self, scored: ScoredBatch) -> np.ndarray | None:
        """Return k1 to the reference summed over each completion; None without a reference."""
        del scored
        return self._call_all_ranks(Call(name="sequence_kl"), self._batch.sequence_kl)

    def probe(self, record: StepRecord, *, kl_coef: float) -> dict[str, ProbeResult]:
        """Run the active probes on some completions of a step."""
        rows = first_rows(record, NUM_PROBED_ROWS)
        return self._call_all_ranks(
            Call(name="probe", arguments={"kl_coef": kl_coef}, record=rows),
            lambda: self._learner.probe(rows, kl_coef=kl_coef),
        )

    def discard(self) -> None:
        """Drop the prepared gradient."""
        self._call_all_ranks(Call(name="discard"), self._learner.discard)

    def move_reference(
        self, step: int, *, keep: float, forget_moments: bool
    ) -> MovingReferenceIdentity | None:
        """Do nothing: a recipe with shards has no moving reference."""
        del step, keep, forget_moments
        return None

    def save(self, folder: Path) -> LearnerState:
        """Write the shards and the full model; return the remaining state."""
        arguments = {"folder": str(folder.resolve())}
        return self._call_all_ranks(
            Call(name="save", arguments=arguments), lambda: self._learner.save(folder)
        )

    def load(self, folder: Path, state: LearnerState) -> None:
        """Restore a checkpoint written by `save`."""
        arguments = {"folder": str(folder.resolve()), "state": state}
        self._call_all_ranks(
            Call(name="load", arguments=arguments), lambda: self._learner.load(folder, state)
        )

    def open_records(self, run: Path) -> RecordSink:
        """Return a writer through which every rank writes its rows of each record."""
        return RankedRecordSink(run, self)

    def write_record(self, run: Path, record: StepRecord) -> None:
        """Let every rank write its rows of the step in the background."""
        arguments = {"run": str(run.resolve())}
        self._call_all_ranks(
            Call(name="write", arguments=arguments),
            lambda: self._batch.write(run, record.facts),
        )

    def flush_records(self) -> None:
        """Block until every rank has written every record."""
        self._call_all_ranks(Call(name="flush"), self._batch.flush)

    def close(self) -> None:
        """Shut down the other ranks."""
        self._channel.send(Call(name=STOP))


class RankedRecordSink:
    """The records of a run, written by all ranks."""

    def __init__(self, run: Path, leader: Rank0Learner) -> None:
        self._run, self._leader = run, leader

    def put(self, record: StepRecord) -> None:
        """Enqueue a record; every rank writes its own rows."""
        self._leader.write_record(self._run, record)

    def flush(self) -> None:
        """Block until every enqueued record is written."""
        self._leader.flush_records()

    def __enter__(self) -> "RankedRecordSink":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not issubclass(kind, RankLostError):
            self.flush()


def serve_calls(
    learner: FsdpLearner, channel: CallChannel, handlers: Mapping[str, Callable[..., None]]
) -> None:
    """Execute calls from rank 0 until it sends stop.

    A handler executes calls that are not of the learner itself; it gets the learner.
    """
    worker = _RankWorker(learner, handlers)
    while True:
        call = channel.receive()
        if call.name == STOP:
            return
        try:
            worker.execute_call(call)
        except RuntimeError as error:
            if _find_timeout(error):  # of another rank; rank 0 reports it
                raise rank_lost_error(error) from error
            raise


class _RankWorker:
    """Executes calls on a rank other than 0; results are discarded."""

    def __init__(self, learner: FsdpLearner, handlers: Mapping[str, Callable[..., None]]) -> None:
        self._learner = learner
        self._handlers = handlers
        self._batch = RankBatch(learner)

    def execute_call(self, call: Call) -> None:
        """Execute one call."""
        if call.name in self._handlers:
            self._handlers[call.name](self._learner, **call.arguments)
        elif call.record is not None:
            getattr(self, f"_{call.name}")(call.record, **call.arguments)
        elif call.shares is not None:
            self._batch.score(call.shares(self._learner.group.rank), **call.arguments)
        elif hasattr(self, f"_{call.name}"):
            getattr(self, f"_{call.name}")(**call.arguments)
        else:
            getattr(self._learner, call.name)(**call.arguments)

    def _prepare(self, *, num_rows: int, **scales: float) -> None:
        self._batch.prepare(LossScales(**scales), num_rows=num_rows)

    def _update_kl(self) -> None:
        self._batch.update_kl()

    def _measure(self, *, clip: dict[str, Any], **updates: Any) -> None:
        self._batch.measure(**updates, clip=ClipRange(**clip))

    def _sequence_kl(self) -> None:
        self._batch.sequence_kl()

    def _probe(self, record: StepRecord, *, kl_coef: float) -> None:
        self._learner.probe(record, kl_coef=kl_coef)

    def _stream_weights(self, *, dtype: str | None) -> None:
        with self._learner.stream_weights(None if dtype is None else getattr(torch, dtype)):
            pass

    def _completion_logits(self, *, prompt: list[int], token_ids: list[int], adapter: bool) -> None:
        self._learner.completion_logits(np.array(prompt), np.array(token_ids), adapter=adapter)

    def _save(self, *, folder: str) -> None:
        self._learner.save(Path(folder))

    def _load(self, *, folder: str, state: LearnerState) -> None:
        self._learner.load(Path(folder), state)

    def _write(self, *, run: str) -> None:
        self._batch.write(Path(run), {})

    def _flush(self) -> None:
        self._batch.flush()
