"""The end of a file that another process writes, cuts back, replaces or removes."""

from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klinic.evidence.files import Journal
from klinic.evidence.tail import JournalTail


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def tail(path):
    with closing(JournalTail(path)) as opened:
        yield opened


def entries(path, *steps):
    for step in steps:
        Journal(path).append({"step": step})


def test_only_what_is_new_comes_and_only_whole_lines(path, tail):
    assert tail.read_update().lines == ()
    entries(path, 1, 2)
    assert len(tail.read_update().lines) == 2
    with path.open("ab") as file:
        file.write(b'{"step"')
    assert tail.read_update().lines == ()
    with path.open("ab") as file:
        file.write(b": 3}\n")
    assert tail.read_update().lines == (b'{"step": 3}\n',)


def test_a_file_that_was_cut_back_says_what_is_left_of_it(path, tail):
    entries(path, 1, 2, 3)
    tail.read_update()
    Journal(path).rewind(lambda entry: entry["step"] <= 1)
    news = tail.read_update()
    assert (news.lines, news.remaining) == ((), (b'{"step": 1}\n',))
    entries(path, 2)
    assert tail.read_update().remaining is None


def test_an_end_that_was_mended_takes_nothing_back(path, tail):
    entries(path, 1)
    with path.open("ab") as file:
        file.write(b'{"st')
    tail.read_update()
    entries(path, 2)  # whoever writes next takes the torn line away, in another file
    news = tail.read_update()
    assert (news.lines, news.remaining) == ((b'{"step": 2}\n',), None)


def test_a_file_that_is_gone_is_taken_back_whole(path, tail):
    entries(path, 1)
    tail.read_update()
    path.unlink()
    assert tail.read_update().remaining == ()
    entries(path, 1)
    assert tail.read_update().lines == (b'{"step": 1}\n',)


@given(st.lists(st.one_of(st.just("look"), st.integers(0, 3)), max_size=20))
def test_whatever_happens_between_looks_the_reader_ends_with_what_is_there(tmp_path_factory, deeds):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    with closing(JournalTail(path)) as tail:
        follow(path, tail, deeds)


def follow(path, tail, deeds):
    known, last = [], 0
    for deed in [*deeds, "look"]:
        if deed == "look":
            news = tail.read_update()
            known = [*(known if news.remaining is None else news.remaining), *news.lines]
            there = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            assert known == there
        elif deed == 0 and path.exists():
            last = max(0, last - 2)
            Journal(path).rewind(lambda entry, last=last: entry["step"] <= last)
        else:
            last += 1
            entries(path, last)
