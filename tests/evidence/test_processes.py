"""The rows of several processes become one record."""

import numpy as np
import pytest

from klinic.errors import ConfigError
from klinic.evidence import store
from klinic.evidence.processes import (
    ProcessRows,
    all_gather_json,
    call_on_rank_0,
    gather_rows,
    join_records,
    merge_facts,
    split_by_process,
)
from klinic.evidence.record import StepRecord
from process_threads import run_in_processes


def record_of(rank, *, group, **changes):
    """Two rows of two tokens, whose ids name their rank."""
    given = {
        "step": 1,
        "group": np.array(group),
        "row_offsets": np.array([0, 2, 4]),
        "token_ids": np.full(4, rank),
        "loss_mask": np.ones(4, np.bool_),
        "prompt_ids": np.array([rank, rank]),
        "prompt_offsets": np.array([0, 1, 2]),
        "facts": {"loss": float(rank), "num_moved_rows": 1, "weights_published": "a"},
    }
    return StepRecord(**{**given, **changes})


def test_the_rows_of_all_processes_arrive_at_rank_0():
    def body(process):
        own = record_of(process.rank, group=[7, 9] if process.rank == 0 else [9, 12])
        return gather_rows(process, ProcessRows(record=own, values={"rank": process.rank}))

    parts, nothing = run_in_processes(2, body)
    assert nothing == []
    assert [part.values["rank"] for part in parts] == [0, 1]
    joined = join_records([part.record for part in parts])
    assert joined.group.tolist() == [0, 1, 1, 2]  # the second spans both processes
    assert joined.process.tolist() == [0, 0, 1, 1]
    assert joined.token_ids.tolist() == [0] * 4 + [1] * 4
    assert joined.facts == {"loss": 0.5, "num_moved_rows": 2, "weights_published": "a"}


def test_a_column_that_one_process_lacks_is_unknown_or_dropped():
    logp = np.full(4, -0.5, np.float32)
    one = record_of(0, group=[0, 1], logp_sampler=logp, entropy=logp)
    other = record_of(1, group=[1, 2], round_trip=np.array([True, False]))
    joined = join_records([one, other])
    assert joined.entropy is None
    assert np.isnan(joined.logp_sampler).tolist() == [False] * 4 + [True] * 4
    assert joined.round_trip.tolist() == [True, True, True, False]


def test_fingerprints_that_differ_are_no_process_own():
    pairs = [{"weights_loaded": "a", "x": None}, {"weights_loaded": "b", "x": 2}]
    assert merge_facts(pairs) == {"weights_loaded": "a,b", "x": 2}
    counts = [{"num_changed_rows": None}, {"num_changed_rows": 3}]
    assert merge_facts(counts) == {"num_changed_rows": None}


def test_each_process_has_a_part_on_disk(tmp_path):
    joined = join_records([record_of(rank, group=[rank, rank + 1]) for rank in (0, 1)])
    store.write_record(tmp_path, joined)
    folder = store.step_folder(tmp_path, 1)
    assert sorted(path.name for path in folder.glob("part-*")) == [
        "part-00000.parquet",
        "part-00001.parquet",
    ]
    read = store.read_record(tmp_path, 1)
    assert read.process.tolist() == [0, 0, 1, 1]
    assert read.token_ids.tolist() == joined.token_ids.tolist()
    assert read.facts == joined.facts


def test_rows_in_another_order_than_their_processes_stay_in_one_part(tmp_path):
    mixed = record_of(0, group=[0, 1], process=np.array([1, 0]))
    store.write_record(tmp_path, mixed)
    assert store.read_record(tmp_path, 1).process.tolist() == [1, 0]


def test_the_rows_of_a_process_know_no_counts_of_the_step():
    joined = join_records([record_of(rank, group=[rank, rank]) for rank in (0, 1)])
    parts = split_by_process(joined)
    assert {rank: part.token_ids.tolist() for rank, part in parts.items()} == {
        0: [0] * 4,
        1: [1] * 4,
    }
    assert all("num_moved_rows" not in part.facts for part in parts.values())


def test_every_process_learns_what_the_others_have():
    results = run_in_processes(3, lambda p: all_gather_json(p, {"rank": p.rank}))
    assert results == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


def test_an_error_of_rank_0_is_raised_by_every_process():
    def body(process):
        def call():
            raise ConfigError("the folder is not empty")

        return call_on_rank_0(process, call)

    for result in run_in_processes(2, body):
        assert isinstance(result, ConfigError)
        assert "not empty" in str(result)
    paths = run_in_processes(2, lambda p: call_on_rank_0(p, lambda: f"run {p.rank}"))
    assert paths == ["run 0", "run 0"]


def test_a_single_process_raises_its_own_error():
    with pytest.raises(ConfigError):
        call_on_rank_0(run_in_processes(1, lambda p: p)[0], _refuse)


def _refuse() -> str:
    raise ConfigError("refused")
