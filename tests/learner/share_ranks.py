"""What each process of `test_row_shares.py` does: train on shares of rows, and on whole records.

python share_ranks.py RANK SIZE FOLDER
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rpc_ranks import KL_COEF, batch, sharded

from klinic.evidence import store
from klinic.evidence.record import StepRecord, first_rows
from klinic.learner import rpc
from klinic.learner.fsdp import FsdpLearner
from klinic.learner.protocol import LossScales
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.model.weights import full_tensor

SCALES = LossScales(kl_coef=KL_COEF)
STEP = 2
COLUMNS = ("logp", "logp_old", "logp_ref", "entropy", "kl_exact", "rank")
LOSSES = ("grpo", "bnpo", "gspo")
"""The other ways to aggregate; all estimators are tried with `dr_grpo`."""
received: list[bytes] = []


def keep_received(tensor: torch.Tensor) -> None:
    """Keep the bytes of a tensor that came from rank 0."""
    received.append(tensor.numpy().tobytes())


def gradient_and_discard(learner: FsdpLearner) -> torch.Tensor:
    """Return the prepared gradient; all ranks make this call."""
    gradient = torch.cat([full_tensor(g).flatten() for g in learner.current_gradients()])
    learner.discard()
    return gradient


def take_gradient(learner: FsdpLearner, *, estimator: str, loss: str) -> None:
    """Take part in a gradient, and in setting the objective of the next one."""
    gradient_and_discard(learner)
    set_objective(learner, estimator, loss)


def set_objective(learner: FsdpLearner, estimator: str, loss: str) -> None:
    """Change the loss of a learner."""
    learner.objective = replace(learner.objective, estimator=estimator, loss=loss)


def from_whole_record(learner: FsdpLearner, record: StepRecord) -> tuple[Any, torch.Tensor]:
    """Return update and gradient if every rank has all rows."""
    prepared = learner.prepare(learner.score(record, needs_reference=True), SCALES)
    return prepared, gradient_and_discard(learner)


def cases() -> list[tuple[str, str, StepRecord]]:
    """Return estimator, loss and record of each comparison."""
    whole = batch(STEP)
    found = [(estimator, "dr_grpo", whole) for estimator in ESTIMATORS]
    found += [("unbiased", loss, whole) for loss in LOSSES]
    one_row = first_rows(whole, 1)  # the other rank has none
    found += [("unbiased", "grpo", one_row), ("sequence", "bnpo", one_row)]
    return found


def compare(rank: int, folder: Path, channel: rpc.BroadcastChannel) -> dict[str, Any]:
    """Return what differs between shares of rows and whole records."""
    learner = sharded("full", "unbiased")
    todo = cases()
    expected = []
    for estimator, loss, record in todo:
        set_objective(learner, estimator, loss)
        expected.append(from_whole_record(learner, record))
    set_objective(learner, *todo[0][:2])
    if rank:
        rpc.serve_calls(learner, channel, {"take_gradient": take_gradient})
        return {"leaked": count_rows_in(received)}
    leader = rpc.Rank0Learner(learner, channel)
    differences = {}
    for number, (estimator, loss, record) in enumerate(todo):
        prepared = leader.prepare(leader.score(record, needs_reference=True), SCALES)
        following = dict(zip(("estimator", "loss"), todo[(number + 1) % len(todo)], strict=False))
        gradient = leader.run_on_ranks("take_gradient", following, gradient_and_discard)
        whole, expected_gradient = expected[number]
        set_objective(learner, **following)
        name = f"{estimator} {loss} {record.num_rows}"
        differences[name] = {
            "norm": float(expected_gradient.norm()),
            "gradient": torch.equal(gradient, expected_gradient),
            "columns": [c for c in COLUMNS if not same(prepared.record, whole.record, c)],
            "metrics": [prepared.metrics, whole.metrics],
            "facts": [dict(prepared.record.facts), dict(whole.record.facts)],
            "finite": prepared.is_finite,
        }
    told = {"differences": differences, **a_step(leader, folder)}
    leader.close()
    return told


def same(one: StepRecord, other: StepRecord, name: str) -> bool:
    """Whether a column is bitwise the same."""
    left, right = getattr(one, name), getattr(other, name)
    return left.dtype == right.dtype and left.tobytes() == right.tobytes()


def a_step(leader: rpc.Rank0Learner, folder: Path) -> dict[str, Any]:
    """Make an update, and write and read its record."""
    record = batch(STEP)
    scored = leader.score(record, needs_reference=True)
    sequence_kl = leader.sequence_kl(scored)
    prepared = leader.prepare(scored, SCALES)
    leader.commit()
    moved = leader.update_kl(scored, prepared.record)
    with leader.open_records(folder) as records:
        records.put(prepared.record)
    read = store.read_record(folder, STEP)
    names = ("token_ids", "group", "sample", "prompt_ids", "reward", *COLUMNS)
    return {
        "sequence_kl": sequence_kl.tolist(),
        "update_kl": moved,
        "mean_k1": prepared.mean_k1,
        "read": {name: same(read, prepared.record, name) for name in names},
    }


def count_rows_in(chunks: list[bytes]) -> dict[str, int]:
    """Return how many rows of either rank came in any of the chunks."""
    record = batch(STEP)
    learner_rows = {0: 0, 1: 0}
    whole = b"".join(chunks)
    for rank in (0, 1):
        for row in OWN_ROWS[rank]:
            ids = record.token_ids[record.row_offsets[row] : record.row_offsets[row + 1]]
            learner_rows[rank] += len(ids) > 3 and ids.astype(np.int32).tobytes() in whole
    return {str(rank): int(num) for rank, num in learner_rows.items()}


OWN_ROWS: dict[int, list[int]] = {}


def main(rank: int, size: int, folder: Path) -> None:
    """Compare, and write down what was found."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    learner = sharded("full", "unbiased")
    sets = learner.split_rows(batch(STEP))
    for number in range(size):
        OWN_ROWS[number] = sorted(int(row) for rows in sets[number::size] for row in rows)
    broadcast, receive = dist.broadcast, dist.recv

    def spied_broadcast(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        done = broadcast(tensor, *args, **kwargs)
        keep_received(tensor)
        return done

    def spied_receive(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        done = receive(tensor, *args, **kwargs)
        keep_received(tensor)
        return done

    dist.broadcast, dist.recv = spied_broadcast, spied_receive
    told = compare(rank, folder, rpc.BroadcastChannel())
    (folder / f"told-{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
