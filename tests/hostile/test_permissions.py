"""What may not be read or written is a fault of the machine: a sentence, exit code 4."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

from hostile.healthy_run import healthy

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="takes rights away as Linux does")
RIGHTS = "-dac_override,-dac_read_search"
RECORD = "records/step=000002/part-00000.parquet"


def klinic(*arguments, cwd):
    """Run the command as a user to whom permissions apply."""
    without = []
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("there is no setpriv to take root's rights away")
        without = ["setpriv", "--bounding-set", RIGHTS, "--inh-caps", RIGHTS]
    return subprocess.run(
        [*without, sys.executable, "-P", "-m", "klinic.cli", *arguments],
        cwd=cwd,
        env={**os.environ, "XDG_CACHE_HOME": str(cwd / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def folder(tmp_path):
    healthy(tmp_path / "run")
    return tmp_path


def assert_denied(ended, *named):
    assert ended.returncode == 4, ended.stdout + ended.stderr
    assert "Permission denied" in ended.stderr
    assert all(name in ended.stderr for name in named)
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", RECORD])
def test_a_file_of_a_run_that_may_not_be_read(folder, name):
    (folder / "run" / name).chmod(0)
    assert_denied(klinic("diagnose", "run", cwd=folder), name)


def test_a_log_that_may_not_be_read(folder):
    (folder / "run" / "metrics.jsonl").chmod(0)
    ended = klinic("diagnose", "run/metrics.jsonl", cwd=folder)
    assert ended.returncode in {2, 4}
    assert "not readable" in ended.stderr or "Permission denied" in ended.stderr


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="draws the page")
def test_a_folder_that_may_not_be_written(folder):
    (folder / "run").chmod(0o555)
    assert_denied(klinic("report", "run", cwd=folder), "report.html")
