"""The strict reader takes what `pack_files` and plain `zip -0` write, and refuses the rest."""

import io
import struct
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klinic.errors import EvidenceError
from klinic.evidence.stored_zip import pack_files, read_members

FILES = [("bundle.json", b"{}"), ("run.json", b'{"a": 1}'), ("empty", b"")]
WHERE = Path("bundle.zip")


def unpack(data):
    return [(member.name, bytes(member.data)) for member in read_members(data, WHERE)]


def archive(write, method=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        write(file)
    return buffer.getvalue()


def test_what_was_packed_is_unpacked():
    data = pack_files(FILES)
    assert unpack(data) == FILES
    with zipfile.ZipFile(io.BytesIO(data)) as file:  # and by everybody's programs
        assert [(name, file.read(name)) for name in file.namelist()] == FILES
        assert file.testzip() is None


@given(st.binary(min_size=1, max_size=3), st.integers(0))
def test_a_changed_byte_is_refused_or_changes_no_content(new, where):
    data = bytearray(pack_files(FILES))
    where %= len(data) - len(new)
    data[where : where + len(new)] = new
    with suppress(EvidenceError):
        assert unpack(bytes(data)) == FILES


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data):
    with pytest.raises(EvidenceError):
        unpack(data)


def test_an_archive_that_is_cut_or_has_more_is_refused():
    data = pack_files(FILES)
    for other in (data[:-1], data[1:], data + b"x", b"x" + data, data[: len(data) // 2], b""):
        with pytest.raises(EvidenceError):
            unpack(other)


def compressed(file):
    file.writestr("bundle.json", b"0" * 100_000)


def twice(file):
    file.writestr("bundle.json", b"a")
    with pytest.warns(UserWarning, match="Duplicate"):
        file.writestr("bundle.json", b"b")


def with_comment(file):
    file.writestr("bundle.json", b"a")
    file.comment = b"read me"


def with_extra(file):
    member = zipfile.ZipInfo("bundle.json")
    member.extra = struct.pack("<HH4s", 0xCAFE, 4, b"data")
    file.writestr(member, b"a")


def with_unicode_name(file):
    file.writestr("bündle.json", b"a")


@pytest.mark.parametrize("write", [twice, with_comment, with_extra, with_unicode_name])
def test_what_a_bundle_never_has_is_refused(write):
    with pytest.raises(EvidenceError):
        unpack(archive(write))


def test_nothing_expands():
    with pytest.raises(EvidenceError, match="compressed"):
        unpack(archive(compressed, zipfile.ZIP_DEFLATED))


def test_members_that_overlap_are_refused():
    """Two entries of one file: the trick by which a small archive holds petabytes."""
    data = pack_files([("bundle.json", b"x" * 50)])
    start = data.index(b"PK\x01\x02")
    directory, end = data[start:-22], data[-22:]
    doubled = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 2, 2, 2 * len(directory), start, 0)
    assert len(doubled) == len(end)
    with pytest.raises(EvidenceError, match="without a gap"):
        unpack(data[:start] + 2 * directory + doubled)
