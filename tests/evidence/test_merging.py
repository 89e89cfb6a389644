"""Metrics of rows that several processes hold are those of all rows in one."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from metric_records import assert_metrics_close, random_record

from klinic.evidence.measures import ClipRange
from klinic.evidence.merging import ONE_PROCESS, largest_of_all
from klinic.evidence.metrics import token_metrics, update_kl
from klinic.evidence.record import select_rows

CLIP = ClipRange(low=0.2, high=0.3)


class Threads:
    """Processes that are threads: each waits for the values of the others."""

    def __init__(self, size):
        self.size = size
        self._barrier = threading.Barrier(size, timeout=20)
        self._values = {}
        self.bytes_exchanged = 0

    def _exchange(self, values):
        values = np.asarray(values)
        self._values[threading.get_ident()] = values.copy()
        self._barrier.wait()
        found = list(self._values.values())
        self._barrier.wait()
        assert len({one.shape for one in found}) == 1
        self.bytes_exchanged += values.nbytes
        return np.stack(found)

    def sum(self, values):
        return self._exchange(values).sum(axis=0)

    def max(self, values):
        return self._exchange(values).max(axis=0)

    def run(self, calls):
        """Return the results of calls that run at the same time, each with this merge."""
        results = [None] * self.size

        def work(number):
            results[number] = calls[number](self)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def divide(record, owners, size):
    return [select_rows(record, np.flatnonzero(owners == n).tolist()) for n in range(size)]


def merged_metrics(parts):
    def measure(part):
        return lambda merge: (
            token_metrics(part, clip=CLIP, kl_coef=0.1, merge=merge)
            | {"update_kl": update_kl(part, merge)}
        )

    return Threads(len(parts)).run([measure(part) for part in parts])


@pytest.mark.parametrize("holes", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("masked", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("size", [2, 5])
def test_each_of_several_processes_gets_the_metrics_of_one(size, masked, holes):
    lengths = np.random.default_rng(1).integers(0, 300, 40)
    record = random_record(2, lengths, masked=masked, holes=holes)
    owners = np.random.default_rng(3).integers(0, size - 1, 40)  # the last has no rows
    expected = token_metrics(record, clip=CLIP, kl_coef=0.1) | {"update_kl": update_kl(record)}
    found = merged_metrics(divide(record, owners, size))
    for metrics in found:
        assert_metrics_close(metrics, expected)
        np.testing.assert_equal(metrics, found[0])  # bitwise the same everywhere


def test_equal_values_at_the_end_of_a_tail_are_counted_as_often_as_they_belong_to_it():
    record = random_record(4, [500] * 6)
    logp_ref = np.where(np.arange(3000) % 100 == 0, record.logp_old - 2, record.logp_old - 1)
    record = replace(record, logp_ref=logp_ref.astype(np.float32), kl_exact=None)
    expected = token_metrics(record, clip=CLIP, kl_coef=0.1) | {"update_kl": update_kl(record)}
    assert expected["kl_k1/p99"] == pytest.approx(1, abs=0.02)
    found = merged_metrics(divide(record, np.arange(6) % 2, 2))
    assert_metrics_close(found[0], expected)


@given(st.data())
def test_the_wanted_values_are_those_of_the_sorted_ones(data):
    finite = st.floats(allow_nan=False, width=64)
    columns = data.draw(st.lists(st.lists(finite, min_size=1, max_size=30), min_size=1, max_size=3))
    arrays = [np.array(column) for column in columns]
    ranks = [data.draw(st.integers(1, len(column))) for column in columns]
    expected = [np.sort(a)[::-1][rank - 1] for a, rank in zip(arrays, ranks, strict=True)]
    np.testing.assert_array_equal(largest_of_all(arrays, ranks, ONE_PROCESS), expected)


def test_what_processes_exchange_does_not_grow_with_the_tokens():
    def num_bytes(length):
        record = random_record(7, [length] * 8)
        threads = Threads(2)
        parts = divide(record, np.arange(8) % 2, 2)
        threads.run([lambda merge, part=part: token_metrics(part, merge=merge) for part in parts])
        return threads.bytes_exchanged / 2

    assert num_bytes(20) == num_bytes(2000) < 2**18
