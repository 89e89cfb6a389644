"""A run whose learner is two processes: as one, resumed by either, and safe when one dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from killing import KLINIC, environment, process_of

from klinic.errors import ConfigError, RankLostError
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.recipe.loading import from_keywords
from klinic.runtime.process_tree import descendant_pids
from open_ports import listening
from process_asserts import wait_until_gone

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
RECIPE = """
model: tiny
data: {task: arithmetic}
kl: {coef: 0.05}
sampling: {max_new_tokens: 6}
loop: {max_steps: 3, prompts_per_step: 3, group_size: 4, checkpoint_every: 1, eval_every: 0,
       eval_prompts: 4}
learner: {learning_rate: 3e-4, micro_batch_size: 5}
output: {trackers: []}
"""


def command(folder: Path, name: str, *more: str) -> list[str]:
    (folder / "recipe.yaml").write_text(RECIPE)
    return [str(KLINIC), "train", str(folder / "recipe.yaml"), f"output.dir={folder / name}", *more]


def run(folder: Path, name: str, *more: str, code: int = 0) -> str:
    started = command(folder, name, *more)
    env = environment(folder / "cache")
    done = subprocess.run(started, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def metrics(folder: Path) -> list[dict[str, float]]:
    return [entry for entry in Journal(folder / "metrics.jsonl").entries() if "loss" in entry]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One run by one process, and one by two."""
    folder = tmp_path_factory.mktemp("shards")
    run(folder, "one")
    said = run(folder, "two", "learner.shards=2")
    assert "Warning" not in said
    return folder


def test_two_processes_train_as_one(runs):
    for one, two in zip(metrics(runs / "one"), metrics(runs / "two"), strict=True):
        for name in ("loss", "grad_norm", "kl", "reward", "entropy"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name


def test_each_process_writes_its_rows_and_they_are_one_record(runs):
    for step in (1, 2, 3):
        parts = sorted((runs / "two" / "records" / f"step={step:06d}").glob("part-*"))
        assert [part.name for part in parts] == ["part-00000.parquet", "part-00001.parquet"]
        one, two = (store.read_record(runs / name, step) for name in ("one", "two"))
        assert one.token_ids.tolist() == two.token_ids.tolist()
        assert two.logp == pytest.approx(one.logp, abs=1e-4)
        assert one.facts["reference_fingerprint"] == two.facts["reference_fingerprint"]


@pytest.mark.slow  # test_fsdp.py loads what one and two saved into one and two
def test_a_run_goes_on_with_one_process_or_two_whoever_began_it(runs):
    for num, shards in ((4, 1), (5, 2)):
        said = run(runs, "two", "--resume", f"learner.shards={shards}", f"loop.max_steps={num}")
        assert f"Resuming after step {num - 1}" in said
    run(runs, "one", "--resume", "loop.max_steps=5")
    for one, two in zip(metrics(runs / "one"), metrics(runs / "two"), strict=True):
        for name in ("loss", "grad_norm", "kl", "reward", "entropy"):
            assert two[name] == pytest.approx(one[name], rel=5e-3, abs=1e-5), name


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


@pytest.mark.slow  # twice the start of two processes
def test_a_process_that_dies_ends_the_run_with_a_sentence_and_it_can_be_resumed(tmp_path):
    started = command(tmp_path, "run", "learner.shards=2", "loop.max_steps=200")
    process = subprocess.Popen(
        started,
        env=environment(tmp_path / "cache"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not (tmp_path / "run" / "checkpoints" / "step=000002").is_dir():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    assert all(address.is_loopback for address in listening(process.pid))
    (follower,) = children(process.pid)
    os.kill(follower, signal.SIGKILL)
    said, _ = process.communicate()
    assert process.returncode == 75
    assert "another rank of this learner exited" in said
    assert "Traceback" not in said
    done = len(metrics(tmp_path / "run"))
    said = run(tmp_path, "run", "--resume", "learner.shards=2", f"loop.max_steps={done + 1}")
    assert "Resuming after step" in said


@pytest.mark.slow
def test_a_process_that_dies_is_replaced_and_none_outlives_the_supervisor(tmp_path):
    folder = tmp_path / "run"
    process = subprocess.Popen(
        command(tmp_path, "run", "learner.shards=2", "loop.max_steps=500"),
        env=environment(tmp_path / "cache", supervised=True),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (folder / "checkpoints" / "step=000002").is_dir():
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    (follower,) = children(process_of(folder))
    os.kill(follower, signal.SIGKILL)
    events = Journal(folder / "events.jsonl")
    while not (told := [event for event in events.entries() if event["event"] == "restarted"]):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    assert told[0]["exit_code"] == RankLostError.exit_code
    while len(metrics(folder)) <= told[0]["step"]:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    everybody = descendant_pids(process.pid)
    assert len(everybody) == 2
    process.kill()
    wait_until_gone(everybody)
    assert "another rank of this learner exited" in process.communicate()[1]


@pytest.mark.slow
def test_torchrun_alone_works(tmp_path, runs):
    torchrun = Path(sys.executable).with_name("torchrun")
    script = command(tmp_path, "run", "learner.shards=2")
    env = environment(tmp_path / "cache")
    started = [str(torchrun), "--standalone", "--nproc-per-node", "2", "--no-python", *script]
    done = subprocess.run(started, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = (metrics(folder) for folder in (tmp_path / "run", runs / "one"))
    assert [e["loss"] for e in ours] == pytest.approx([e["loss"] for e in theirs[:3]], rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"learner.shards": 2, "kl_coef": 0.1, "reference.ema": 0.9}, "the reference moves"),
        ({"learner.shards": 2, "model.compile": True}, "model.compile"),
        ({"sampler.server": "http://127.0.0.1:1"}, "only vllm uses a server"),
    ],
)
def test_what_is_not_built_is_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        from_keywords(model="tiny", task="arithmetic", **settings)
