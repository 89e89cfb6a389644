"""A machine that fails under a run: exit code 4, a sentence, and the run goes on when it is mended.

The faults are real. What is mounted needs the right to mount: without it these tests are skipped.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commands import klinic

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(400),
    pytest.mark.skipif(sys.platform != "linux", reason="mounts as Linux does"),
]
SMALL = (
    *("loop.max_steps=5", "loop.eval_every=0", "loop.eval_prompts=1", "loop.checkpoint_every=1"),
    *("loop.prompts_per_step=2", "loop.group_size=2", "kl.coef=0.05", "sampling.max_new_tokens=4"),
    *("learner.learning_rate=1e-3", "warm_start.steps=5", "output.dir=disk/run"),
)
SAID = {
    "disk_full": "No space left on device",
    "read_only": "Read-only file system",
    "deleted": "No such file or directory",
    "no_memory": "Cannot allocate memory",
    "no_descriptors": "Too many open files",
    "file_size": "File too large",
}


@pytest.fixture
def folder(tmp_path):
    """A folder with a small disk in it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "recipe.yaml").write_text("{model: tiny, task: arithmetic}")
    mount("-t", "tmpfs", "-o", "size=40m", "tmpfs", str(disk))
    yield tmp_path
    unmount(disk / "run")
    unmount(disk)


def mount(*arguments):
    tried = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)  # noqa: S607
    if tried.returncode:
        pytest.skip(f"nothing can be mounted here: {tried.stderr.strip()}")


def unmount(place):
    """Take away what is mounted at a place, if anything is."""
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for _ in range(mounted.count(str(place.resolve()))):
        subprocess.run(["umount", "--lazy", place], check=True)  # noqa: S607


def train(folder, name, *more, trackers="[]"):
    file = Path(__file__).with_name("faulty_machine.py")
    rewards = json.dumps([f"{file}:{name}"])
    given = ["train", "recipe.yaml", f"rewards={rewards}", f"output.trackers={trackers}", *SMALL]
    env = {**os.environ, "FAULT_ONCE": str(folder / "once")}
    return klinic(*given, *more, cwd=folder, env=env, timeout=190)


def files_of(folder):
    """Return what two runs must have in common: the last checkpoint, and every metric but times."""
    run = folder / "disk" / "run"
    newest = max((run / "checkpoints").glob("step=*"))
    names = ("model/model.safetensors", "optimizer.safetensors")
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for entry in metrics:
        for name in [name for name in entry if name.startswith(("time/", "memory/"))]:
            del entry[name]
    return newest.name, [(newest / name).read_bytes() for name in names], metrics


def mend(folder, name):
    """Give the machine back."""
    (folder / "disk" / "filler").unlink(missing_ok=True)
    unmount(folder / "disk" / "run")


def assert_named(ended, name):
    assert ended.returncode == 4, ended.stderr[-3000:]
    assert f"MachineError: {SAID[name]}" in ended.stderr
    for sign in ("Traceback", "Exception in thread", "Internal error"):
        assert sign not in ended.stdout + ended.stderr


def test_a_full_disk_is_named_and_the_run_goes_on_with_room(folder):
    ended = train(folder, "disk_full", trackers="[tensorboard]")
    assert_named(ended, "disk_full")
    assert "continues with --resume" in ended.stderr
    mend(folder, "disk_full")
    resumed = train(folder, "disk_full", "--resume", trackers="[tensorboard]")
    assert resumed.returncode == 0, resumed.stderr
    disturbed = files_of(folder)
    shutil.rmtree(folder / "disk" / "run")
    well = train(folder, "disk_full", trackers="[tensorboard]")  # the fault has been
    assert well.returncode == 0, well.stderr
    assert disturbed == files_of(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SAID if name != "disk_full"])
def test_every_other_fault_is_named_and_the_run_goes_on(folder, name):
    assert_named(train(folder, name), name)
    mend(folder, name)
    again = train(folder, name) if name == "deleted" else train(folder, name, "--resume")
    assert again.returncode == 0, again.stderr
    disturbed = files_of(folder)
    shutil.rmtree(folder / "disk" / "run")
    well = train(folder, name)
    assert well.returncode == 0, well.stderr
    assert disturbed == files_of(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "name"), [("size=1m", "disk_full"), ("ro", "read_only")])
def test_a_disk_that_is_bad_from_the_start(folder, options, name):
    disk = str(folder / "disk")
    subprocess.run(["umount", disk], check=True)  # noqa: S607
    mount("-t", "tmpfs", "-o", options, "tmpfs", disk)
    assert_named(train(folder, "none"), name)
    mount("-o", "remount,rw,size=40m", disk)
    begun = (folder / "disk" / "run" / "recipe.yaml").is_file()
    again = train(folder, "none", *(["--resume"] if begun else []))
    assert again.returncode == 0, again.stderr


@pytest.mark.slow
@pytest.mark.parametrize("place", ["disk/" + "a" * 300, "disk/file/run"])
def test_a_place_that_cannot_be(folder, place):
    (folder / "disk" / "file").touch()
    ended = train(folder, "none", f"output.dir={place}")
    assert ended.returncode in {2, 4}
    assert "Traceback" not in ended.stderr
    assert "Internal error" not in ended.stderr
