"""A rank that hangs is found, and a rank that waits for its next call is not taken for one."""

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from klinic.learner.rpc import rank_lost_error
from klinic.training.learner_processes import COLLECTIVE_TIMEOUT

SCRIPT = Path(__file__).with_name("hung_rank.py")


@pytest.mark.engine
def test_a_collective_with_a_hung_rank_ends_with_one_sentence(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        out, err = ranks[0].communicate(timeout=90)
        assert ranks[0].returncode == 0, err
        found = json.loads(out)
        assert found["sum"] == [2.0, 2.0, 2.0]  # after a pause above the limit
        assert found["error"] == (
            "another rank of this learner hangs: a collective of all ranks did not complete in "
            "time (Timed out waiting 2000ms for recv operation to complete). Only the steps since "
            "the newest checkpoint are lost: continue with --resume."
        )
        assert found["seconds"] < 10
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_the_limit_of_a_collective_is_minutes():
    assert timedelta(hours=1) >= COLLECTIVE_TIMEOUT


def test_a_rank_that_exited_is_not_called_hung():
    assert "exited" in str(rank_lost_error(RuntimeError("Connection closed by peer")))
