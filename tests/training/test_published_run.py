"""A run at a URL: killed on one machine and continued on another, it is the run that was not."""

import signal
import subprocess
import time
from pathlib import Path

import pytest
from rich.console import Console

from klinic.errors import ConfigError, MachineError
from klinic.evidence.remote.fetching import fetch_run
from klinic.evidence.remote.object_store import ObjectStore
from klinic.evidence.remote.publishing import RunPublisher
from klinic.evidence.remote.snapshot import newest_snapshot
from klinic.evidence.remote.url import local_folder
from klinic.recipe.loading import load_recipe
from klinic.training.source import PythonInputs
from klinic.training.train import train
from training.killing import KLINIC, RECIPE, differences, environment

pytest.importorskip("fsspec")
pytestmark = pytest.mark.timeout(600)
KILLED_AFTER = 6  # steps with a checkpoint at the URL


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    folder = tmp_path_factory.mktemp("whole")
    done = run_to_end(folder, cache, f"output.dir={folder / 'run'}")
    assert done.returncode == 0, done.stderr
    return folder / "run"


def start(folder, cache, *more):
    (folder / "recipe.yaml").write_text(RECIPE)
    command = [str(KLINIC), "train", "recipe.yaml", "output.trackers=[]", *more]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment(cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_to_end(folder, cache, *more):
    process = start(folder, cache, *more)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def machine(tmp_path, name):
    """Return a working directory of its own."""
    (tmp_path / name).mkdir()
    return tmp_path / name


def has_checkpoint(url, step):
    snapshot = newest_snapshot(ObjectStore(url))
    return snapshot is not None and f"checkpoints/step={step:06d}/manifest.json" in snapshot.files


@pytest.mark.slow  # the start of four processes; the same in one process is below
def test_killed_on_one_machine_a_run_goes_on_at_another(tmp_path, cache, whole):
    url = f"file://{tmp_path}/shared/run"
    first, second = machine(tmp_path, "first"), machine(tmp_path, "second")
    process = start(first, cache, f"output.dir={url}")
    while process.poll() is None and not has_checkpoint(url, KILLED_AFTER):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    out, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, out
    done = run_to_end(second, cache, f"output.dir={url}", "--resume")
    assert done.returncode == 0, done.stderr
    assert f"published at {url}" in " ".join(done.stdout.split())
    assert "Resuming after step" in done.stdout
    trained = second / local_folder(url)
    assert differences(whole, trained) == []
    fetch_run(ObjectStore(url), tmp_path / "fetched")
    assert differences(whole, tmp_path / "fetched") == []
    # the first machine continues, with a folder that is older than the URL
    done = run_to_end(first, cache, f"output.dir={url}", "--resume", "loop.checkpoint_every=3")
    assert done.returncode == 0, done.stderr
    assert "was moved to" in done.stdout
    assert differences(whole, first / local_folder(url)) == []
    again = run_to_end(second, cache, f"output.dir={url}")
    assert "where a run is already" in again.stderr


class KilledError(BaseException):
    """Ends a run as a kill would: nothing is published afterwards."""


@pytest.fixture
def train_here(tmp_path, cache, monkeypatch):
    """Train in this process, in a working directory of its own."""
    monkeypatch.setenv("KLINIC_CACHE", str(cache))
    monkeypatch.chdir(machine(tmp_path, "first"))

    def train_in_process(url, *more, start="new"):
        Path("recipe.yaml").write_text(RECIPE)
        overrides = ["output.trackers=[]", f"output.dir={url}", *more]
        recipe, console = load_recipe("recipe.yaml", overrides).recipe, Console(quiet=True)
        return train(recipe, name="run", inputs=PythonInputs(), start=start, console=console)

    return train_in_process


def test_in_memory_a_run_goes_on_where_it_was_lost(tmp_path, train_here, whole, monkeypatch):
    url, publish = "memory://lost/run", RunPublisher.start

    def start_or_die(self):
        if has_checkpoint(url, KILLED_AFTER):
            raise KilledError
        return publish(self)

    with monkeypatch.context() as patch:
        patch.setattr(RunPublisher, "start", start_or_die)
        patch.setattr(RunPublisher, "finish", lambda _: None)
        with pytest.raises(KilledError):
            train_here(url)
    assert not has_checkpoint(url, 12)
    monkeypatch.chdir(machine(tmp_path, "second"))
    result = train_here(url, start="resume")
    assert result.step == 12
    assert differences(whole, tmp_path / "second" / result.folder) == []


SHORT = ("loop.max_steps=4", "loop.eval_every=0", "warm_start=null")


@pytest.mark.slow  # the publisher alone is tested without a training
def test_a_store_that_fails_for_a_while_does_not_stop_the_run(train_here, monkeypatch):
    write, url = ObjectStore.write, "memory://unreliable/run"
    is_gone = False

    def unreliable(self, name, data):
        if is_gone:
            raise FileNotFoundError("the network is gone")
        write(self, name, data)

    start = RunPublisher.start

    def start_without_network(self):
        nonlocal is_gone
        is_gone = not has_checkpoint(url, 4)
        return start(self)

    def finish_with_network(self):
        nonlocal is_gone
        is_gone = False
        finish(self)

    finish = RunPublisher.finish
    monkeypatch.setattr(ObjectStore, "write", unreliable)
    monkeypatch.setattr(RunPublisher, "start", start_without_network)
    monkeypatch.setattr(RunPublisher, "finish", finish_with_network)
    result = train_here(url, *SHORT)
    assert (result.folder / "events.jsonl").read_text().count('"event": "not published"') == 1
    assert has_checkpoint(url, 4)


@pytest.mark.slow  # two trainings
def test_the_end_of_a_run_that_cannot_be_published_is_an_error(train_here, monkeypatch):
    url, finish = "memory://ended/run", RunPublisher.finish

    def gone(*_):
        raise FileNotFoundError("the network is gone")

    def finish_without_network(self):
        with monkeypatch.context() as patch:
            patch.setattr(ObjectStore, "write", gone)
            finish(self)

    with monkeypatch.context() as patch:
        patch.setattr(RunPublisher, "finish", finish_without_network)
        with pytest.raises(MachineError, match="the end of the run is not there"):
            train_here(url, *SHORT)
    train_here(url, *SHORT, start="resume")  # the local folder is the newest state
    assert has_checkpoint(url, 4)
    assert [path.name for path in Path("runs").iterdir()] == [local_folder(url).name]
    with pytest.raises(ConfigError, match="only moves local folders aside"):
        train_here(url, *SHORT, start="over")
    with pytest.raises(ConfigError, match="there is no run at memory://nowhere/run"):
        train_here("memory://nowhere/run", *SHORT, start="resume")
