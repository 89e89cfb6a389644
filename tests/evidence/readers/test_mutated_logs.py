"""Logs and records that were damaged: never a traceback, never a hang, always a reason.

The proof is of 20,000, in one process and, of some hundred, in processes of their own; it is marked
slow, and what it found is in docs/log.md.
"""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mutating import LIMIT, case, originals, wrong_with

PROGRAM = Path(__file__).with_name("mutating.py")
HAS_TORCH = importlib.util.find_spec("torch") is not None
KINDS = 39 + 3 * HAS_TORCH  # of logs, tables, texts and dumps, and records
KLINIC = [sys.executable, "-P", "-m", "klinic.cli"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="makes pipes, holes and devices")


def damaged(count, seed, *, timeout):
    """Damage and diagnose so many in a process without type checks, as the command is."""
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), str(count), str(seed)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert ended.stdout, ended.stderr
    found = json.loads(ended.stdout)
    assert found["faults"] == []
    assert found["cases"] == count
    return found


@pytest.mark.timeout(600)
def test_some_damaged_logs_are_read_or_refused():
    found = damaged(200, 1_000_000, timeout=500)
    assert set(found["codes"]) == {"0", "1", "2"}
    assert len(found["kinds"]) == KINDS


@pytest.mark.slow
@pytest.mark.timeout(14_400)
def test_20_000_damaged_logs_are_read_or_refused():
    found = damaged(20_000, 0, timeout=14_000)
    assert len(found["kinds"]) == KINDS


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_300_damaged_logs_in_processes_of_their_own(tmp_path):
    kinds = originals(tmp_path / "originals")
    slowest = 0.0
    for number in range(2_000_000, 2_000_300):
        folder = tmp_path / str(number)
        folder.mkdir()
        _, path = case(kinds, number, folder)
        as_json = number % 2 == 0
        start = time.perf_counter()
        ended = subprocess.run(
            [*KLINIC, "diagnose", str(path), *(["--json"] if as_json else [])],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        slowest = max(slowest, time.perf_counter() - start)
        assert not wrong_with(ended.returncode, ended.stdout, ended.stderr, as_json=as_json), path
    sys.stderr.write(f"slowest process: {slowest:.2f} s (limit in one process {LIMIT} s)\n")


@pytest.mark.parametrize(
    "answer",
    [
        (3, "", "Internal error (a bug in klinic): TypeError: x"),
        (2, "", "Traceback (most recent call last)"),
        (2, "", ""),
        (2, "half of an answer", "EvidenceError: x"),
        (0, "\x1b[2J", ""),
    ],
)
def test_what_must_not_be_would_be_seen(answer):
    assert wrong_with(*answer, as_json=False)


def test_json_that_is_none_would_be_seen():
    with pytest.raises(ZeroDivisionError):
        wrong_with(0, '{"kl": NaN}', "", as_json=True)
