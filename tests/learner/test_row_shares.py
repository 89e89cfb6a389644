"""Each rank receives its rows alone, and trains as if it had received those of all."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rpc_ranks import batch, wound_up
from test_shard_loading import run_ranks

from evidence.metric_records import assert_metrics_close
from klinic.evidence.measures import ClipRange
from klinic.evidence.metrics import updates_metrics
from klinic.learner.packing import lay_out_batches, split_rows
from klinic.learner.protocol import LossScales, PreparedUpdate
from klinic.learner.rank_batch import gather_columns
from klinic.learner.row_shares import decode_share, encode_share, share_of_rank
from klinic.learner.step_rows import StepRows
from klinic.maths.kl_estimators import ESTIMATORS

AT_WORK = Path(__file__).parent / "share_ranks.py"
SCALES = LossScales(kl_coef=0.3)
MEASURED = {"clip": ClipRange(low=0.2, high=0.2), "kl_coef": 0.3}
COLUMNS = ("logp", "logp_old", "logp_ref", "entropy", "kl_exact", "rank")


class ThreadGroup:
    """A rank that is a thread: it waits for the values of the others."""

    def __init__(self, rank, size, barrier, values):
        self.rank, self.size = rank, size
        self._barrier, self._values = barrier, values

    def _exchange(self, values):
        self._values[self.rank] = values.clone()
        self._barrier.wait()
        stacked = torch.stack([self._values[rank] for rank in range(self.size)])
        self._barrier.wait()
        return stacked

    def all_reduce_sum(self, values):
        return self._exchange(values).sum(0).to(values.dtype)

    def all_reduce_max(self, values):
        return self._exchange(values).amax(0)


def updates_of(record):
    """Return the only update of a batch as the first and the last."""
    update = PreparedUpdate(record=record, metrics={}, finite_at={}, mean_k1=None)
    return update, update


def train_share(learner, record, group):
    """Score and prepare the rows of a rank; return its learner, its update and its metrics."""
    learner.group = group
    row_sets = split_rows(record, size=learner.settings.micro_batch_size, num_ranks=group.size)
    share = share_of_rank(record, row_sets, rank=group.rank, num_ranks=group.size)
    share = decode_share(encode_share(share))
    cpu = torch.device("cpu")
    batches = lay_out_batches(share.record, share.row_sets(), pad_id=0, device=cpu)
    rows = StepRows(record=share.record, batches=batches, group=group, share=share)
    scored = learner._score_rows(rows, needs_reference=True)
    sequence_kl = learner.sequence_kl(scored)
    update = learner.prepare(scored, SCALES)
    return {
        "gradient": torch.cat([g.flatten() for g in learner.current_gradients()]),
        "update": update,
        "sequence_kl": sequence_kl,
        "columns": gather_columns(scored, update.record, record.num_rows),
        "metrics": updates_metrics(update.record, update.record, **MEASURED, merge=scored.merge),
    }


def train_shares(learners, record):
    size, values = len(learners), {}
    barrier, found = threading.Barrier(size, timeout=60), [None] * size

    def work(rank):
        found[rank] = train_share(learners[rank], record, ThreadGroup(rank, size, barrier, values))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize(
    ("estimator", "size"), [*((estimator, 2) for estimator in ESTIMATORS), ("sequence", 9)]
)
def test_ranks_with_their_rows_alone_have_gradient_and_metrics_of_one_process(estimator, size):
    record, alone = batch(2), wound_up("full", estimator)
    scored = alone.score(record, needs_reference=True)
    expected = alone.prepare(scored, SCALES)
    gradient = torch.cat([g.flatten() for g in alone.current_gradients()])
    found = train_shares([wound_up("full", estimator) for _ in range(size)], record)
    total = sum(one["gradient"] for one in found)
    assert float((total - gradient).norm() / gradient.norm()) < 1e-12
    for one in found:
        whole = replace(expected.record, **one["columns"])
        for name in COLUMNS:
            column = getattr(expected.record, name)
            assert one["columns"][name].dtype == column.dtype
            np.testing.assert_allclose(one["columns"][name], column, atol=1e-12, rtol=1e-12)
        # order statistics bitwise, sums to 1e-12
        assert_metrics_close(one["metrics"], alone.measure(*updates_of(whole), **MEASURED))
        assert one["update"].mean_k1 == pytest.approx(expected.mean_k1, rel=1e-12)
        assert one["update"].finite_at == expected.finite_at
        np.testing.assert_allclose(one["sequence_kl"], alone.sequence_kl(scored), rtol=1e-12)
        facts, denominator = one["update"].record.facts, expected.record.facts["loss_denominator"]
        assert facts["loss_denominator"] == pytest.approx(denominator, rel=1e-12)
        assert facts["num_micro_batches"] == len(split_rows(record, size=3, num_ranks=size))


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shares")
    run_ranks(AT_WORK, 2, folder)
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_shares_of_rows_give_the_bits_of_whole_records(told):
    for name, found in told[0]["differences"].items():
        assert found["gradient"], name
        assert found["norm"] > 1e-3
        assert not found["columns"], name
        for one, other in (found["metrics"], found["facts"]):
            assert one.keys() == other.keys()
            for key, value in other.items():
                same = value if isinstance(value, str) else pytest.approx(value, rel=1e-12)
                assert one[key] == same, (name, key)


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_a_rank_never_receives_the_rows_of_another(told):
    leaked = told[1]["leaked"]
    assert leaked["1"] > 0  # its own, so that the search finds rows
    assert leaked["0"] == 0


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_what_needs_all_rows_is_merged(told):
    alone = wound_up("full", "unbiased")
    scored = alone.score(batch(2), needs_reference=True)
    assert told[0]["sequence_kl"] == pytest.approx(alone.sequence_kl(scored).tolist(), rel=1e-12)
    prepared = alone.prepare(scored, SCALES)
    assert told[0]["mean_k1"] == pytest.approx(prepared.mean_k1, rel=1e-12)
    alone.commit()
    moved = alone.update_kl(scored, prepared.record)
    assert told[0]["update_kl"] == pytest.approx(moved, rel=1e-8)


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_records_of_all_ranks_are_read_in_the_order_of_the_step(told):
    assert all(told[0]["read"].values()), told[0]["read"]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 20])
def test_a_share_arrives_as_it_was_sent(num_ranks):
    record = batch()
    row_sets = split_rows(record, size=2, num_ranks=num_ranks)
    seen = []
    for rank in range(num_ranks):
        share = share_of_rank(record, row_sets, rank=rank, num_ranks=num_ranks)
        found = decode_share(encode_share(share))
        assert found.row_sets()[0][0].tolist() == share.row_sets()[0][0].tolist()
        assert [counts for _, counts in found.row_sets()] == [c for _, c in share.row_sets()]
        assert (found.num_batches, found.num_step_rows) == (share.num_batches, record.num_rows)
        for name in ("token_ids", "loss_mask", "logp_sampler", "reward", "advantage", "group"):
            np.testing.assert_array_equal(getattr(found.record, name), getattr(share.record, name))
        seen += found.rows.tolist()
        assert len(found.rows) or not found.record.loss_mask.any()
    assert sorted(seen) == list(range(record.num_rows))
