"""The garbage collector is paused for imports alone."""

import gc
import subprocess
import sys
from contextlib import suppress

import pytest

from klinic.runtime.import_speed import pause_collection


def test_the_collector_is_paused_inside_and_runs_afterwards():
    with suppress(ImportError), pause_collection():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_what_was_imported_is_left_out_of_later_collections():
    before = gc.get_freeze_count()
    try:
        with pause_collection():
            kept = [[] for _ in range(1000)]
        assert gc.get_freeze_count() >= before + len(kept)
    finally:
        gc.unfreeze()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with pause_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.torch
def test_no_library_reports_leaks_at_the_end():
    code = (
        "from klinic.runtime.import_speed import pause_collection\n"
        "with pause_collection():\n"
        "    import torch._dynamo, triton._C.libtriton"
    )
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
