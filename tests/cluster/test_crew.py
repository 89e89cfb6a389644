"""Work that is shared among members, of whom some are lost: everything is done, once, in order."""

import pytest

pytest.importorskip("ray")

from hypothesis import given
from hypothesis import strategies as st

from klinic.cluster import crew as crew_module
from klinic.cluster.crew import Crew, MemberLostError
from klinic.cluster.placement import Place
from klinic.cluster.shares import shared, split

HERE = Place(kind="sampler", number=0, cpus=1, gpus=0)


class Pretend(Crew):
    """A crew whose members are names, and whose losses are written down beforehand."""

    def __init__(self, members, losses):
        self.members = list(members)
        self.losses = list(losses)
        self.asked = []

    def ask(self, member, name, share, *more):
        self.asked.append((member, share))
        return len(self.asked) - 1

    def first(self, refs):
        return refs[0]

    def answer(self, member, ref):
        if self.losses and self.losses.pop(0):
            self.members.remove(member)
            self.members.append(f"{member}'")
            raise MemberLostError
        return [2 * item for item in self.asked[ref][1]]


@given(
    st.lists(st.integers(), min_size=1, max_size=20),
    st.integers(1, 4),
    st.lists(st.booleans(), max_size=12),
)
def test_everything_is_done_once_and_in_order_whoever_is_lost(items, num, losses):
    crew = Pretend([f"m{i}" for i in range(num)], losses)
    shares = list(split(items, num))
    done = shared(crew, "double", shares, able=lambda: crew.members)
    assert [item for share in done for item in share] == [2 * item for item in items]
    assert {tuple(share) for _, share in crew.asked} == {tuple(share) for share in shares}


@given(st.lists(st.integers(), max_size=30), st.integers(1, 8))
def test_shares_are_all_items_in_order_and_nearly_equal(items, num):
    shares = list(split(items, num))
    assert [item for share in shares for item in share] == items
    sizes = [len(share) for share in shares]
    assert not sizes or (min(sizes) > 0 and max(sizes) - min(sizes) <= 1)
    assert len(shares) == min(num, len(items))


def test_losses_without_end_end_the_run():
    crew = object.__new__(crew_module.Crew)
    crew._replaces, crew._lost_in_a_row, crew.size = True, 0, 1
    crew._news = lambda _: None
    crew._start = lambda place: Lost()
    crew.members = [Lost()]
    for _ in range(crew_module.MOST_LOST):
        crew.lose(crew.members[0], "it was killed")
    with pytest.raises(crew_module.WorkerLostError, match="one after another"):
        crew.lose(crew.members[0], "it was killed")


class Lost(crew_module.Member):
    """A member that is gone already."""

    def __init__(self):
        super().__init__(handle=None, place=HERE, built=None)

    def end(self):
        pass
