"""Who dies with whom."""

import os
import signal
import subprocess
import sys
import time

import pytest

from klinic.runtime.process_tree import descendant_pids

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")


@pytest.mark.parametrize(("parent", "code"), [("os.getppid()", 0), ("1 + 2**30", -signal.SIGKILL)])
def test_one_whose_parent_is_gone_already_dies_at_once(parent, code):
    imports = "import os; from klinic.runtime.process_tree import die_with_parent"
    script = f"{imports}; die_with_parent({parent})"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == code


def test_descendants_are_children_and_theirs_whatever_they_are_called(tmp_path):
    odd = tmp_path / "a) S 1 (b"
    odd.symlink_to("/bin/sh")
    with subprocess.Popen([odd, "-c", "sleep 100 & wait"]) as process:
        limit = time.monotonic() + 10
        while len(found := descendant_pids(process.pid)) < 1:
            assert time.monotonic() < limit
        assert found | {process.pid} <= descendant_pids(os.getpid())
        for pid in (process.pid, *found):
            os.kill(pid, signal.SIGKILL)
