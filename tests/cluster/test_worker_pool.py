"""Work that is shared among members, of whom some are lost: everything is done, once, in order."""

import pytest

pytest.importorskip("ray")

from hypothesis import given
from hypothesis import strategies as st

from klinic.cluster import worker_pool as pool_module
from klinic.cluster.placement import WorkerPlacement
from klinic.cluster.worker_pool import (
    PooledWorkerLostError,
    WorkerPool,
    map_over_pool,
    split_evenly,
)

HERE = WorkerPlacement(kind="sampler", number=0, cpus=1, gpus=0, bundle=0)


class Pretend(WorkerPool):
    """A crew whose members are names, and whose losses are written down beforehand."""

    def __init__(self, members, losses):
        self.workers = list(members)
        self.losses = list(losses)
        self.asked = []

    def submit(self, member, name, share, *more):
        self.asked.append((member, share))
        return len(self.asked) - 1

    def wait_first(self, refs):
        return refs[0]

    def get_result(self, member, ref):
        if self.losses and self.losses.pop(0):
            self.workers.remove(member)
            self.workers.append(f"{member}'")
            raise PooledWorkerLostError
        return [2 * item for item in self.asked[ref][1]]


@given(
    st.lists(st.integers(), min_size=1, max_size=20),
    st.integers(1, 4),
    st.lists(st.booleans(), max_size=12),
)
def test_everything_is_done_once_and_in_order_whoever_is_lost(items, num, losses):
    crew = Pretend([f"m{i}" for i in range(num)], losses)
    shares = list(split_evenly(items, num))
    done = map_over_pool(crew, "double", shares, available=lambda: crew.workers)
    assert [item for share in done for item in share] == [2 * item for item in items]
    assert {tuple(share) for _, share in crew.asked} == {tuple(share) for share in shares}


@given(st.lists(st.integers(), max_size=30), st.integers(1, 8))
def test_shares_are_all_items_in_order_and_nearly_equal(items, num):
    shares = list(split_evenly(items, num))
    assert [item for share in shares for item in share] == items
    sizes = [len(share) for share in shares]
    assert not sizes or (min(sizes) > 0 and max(sizes) - min(sizes) <= 1)
    assert len(shares) == min(num, len(items))


def test_losses_without_end_end_the_run():
    crew = object.__new__(pool_module.WorkerPool)
    crew._replaces, crew._lost_in_a_row, crew.size = True, 0, 1
    crew._report_event = lambda _: None
    crew._start_worker = lambda place: Lost()
    crew.workers = [Lost()]
    for _ in range(pool_module.MAX_LOST_IN_A_ROW):
        crew.replace_worker(crew.workers[0], "it was killed")
    with pytest.raises(pool_module.WorkerLostError, match="processes in a row were lost"):
        crew.replace_worker(crew.workers[0], "it was killed")


class Lost(pool_module.PooledWorker):
    """A member that is gone already."""

    def __init__(self):
        super().__init__(handle=None, placement=HERE, build_ref=None)

    def kill(self):
        pass
