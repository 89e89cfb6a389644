"""Memory that is freed while a model is loaded goes back to the operating system."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
# one large block raises glibc's threshold, and the last small one keeps the heap from shrinking
PROGRAM = """
import contextlib
from klinic.runtime.freed_memory import freed_memory_returned

MEGABYTE = 2**20

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def held_after_freeing():
    before = resident()
    blocks = [bytearray(b"x") * MEGABYTE for _ in range(100)]
    last = blocks.pop()
    blocks.clear()
    return (resident() - before) // MEGABYTE

bytearray(b"x") * (24 * MEGABYTE)
with {context}:
    print(held_after_freeing())
"""


def megabytes_held(context: str) -> int:
    program = PROGRAM.replace("{context}", context)
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_freed_blocks_are_returned_within_the_context():
    assert megabytes_held("contextlib.nullcontext()") > 50
    assert megabytes_held("freed_memory_returned()") < 10
