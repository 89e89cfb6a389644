"""Ranks write their rows of every step, and rank 0 merges them beside the training."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from evidence.records import assert_same, full_record
from klinic.evidence import store
from klinic.evidence.part_merging import MAX_FILES
from klinic.evidence.record import select_rows
from klinic.learner.rank_records import RankRecordWriter

NUM_RANKS = 12


class ThreadGroup:
    """Ranks that are threads of one process."""

    size = NUM_RANKS

    def __init__(self, rank, shared):
        self.rank, self._shared = rank, shared

    def all_reduce_sum(self, values):
        self._shared.terms[self.rank] = values
        self._shared.barrier.wait()
        total = torch.stack(self._shared.terms).sum(0)
        self._shared.barrier.wait()
        return total

    all_reduce_max = all_reduce_sum


class Shared:
    def __init__(self):
        self.terms, self.barrier = [None] * NUM_RANKS, threading.Barrier(NUM_RANKS)


def test_the_parts_of_all_ranks_are_merged_and_hold_the_step(tmp_path):
    records = [full_record(step=step, lengths=(2, 0, 3) * 10) for step in (1, 2, 3)]
    shared = Shared()

    def write(rank):
        writer = RankRecordWriter(ThreadGroup(rank, shared))
        for record in records:
            own = np.arange(record.num_rows)[rank::NUM_RANKS]  # not consecutive
            writer.start_record(tmp_path, select_rows(record, own.tolist()), own)
        writer.flush()

    with ThreadPoolExecutor(max_workers=NUM_RANKS) as pool:
        list(pool.map(write, range(NUM_RANKS)))
    for record in records:
        assert_same(store.read_record(tmp_path, record.step), record)
        names = list(store.step_folder(tmp_path, record.step).glob("part-*"))
        assert len(names) <= MAX_FILES
