"""Who is told about a run: the same run after a resume, whatever happens to the teller."""

import json
import os
import pty
import subprocess
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import klinic
from klinic.errors import ConfigError, EvidenceError, MissingExtraError, RewardError
from klinic.evidence.files import Journal
from klinic.recipe.loading import from_keywords
from klinic.trackers import select
from klinic.trackers.tensorboard import TensorBoardTracker
from klinic.trackers.wandb import reserve_rows

pytestmark = pytest.mark.timeout(240)
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(4)]
SMALL = {
    "max_steps": 3,
    "prompts_per_step": 2,
    "group_size": 3,
    "max_new_tokens": 4,
    "learning_rate": 1e-3,
    "threads": 1,
    "kl_coef": 0.1,
    "loop.checkpoint_every": 2,
    "output.trackers": [],
    "output.doctor": "none",
}


def digits(prompts, completions, **columns):
    return [sum(c.isdigit() for c in text) / 4 for text in completions]


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch):
    """Nobody's own settings, and nothing left set for other tests."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    for name, value in {"MODE": "offline", "CONFIG_DIR": "c", "CACHE_DIR": "d"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value if name == "MODE" else str(tmp_path / value))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody")
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(mode=False)


def run(name, reward=digits, **settings):
    settings = {**SMALL, "output.dir": name, **settings}
    return klinic.train(model="tiny", reward_funcs=reward, train_dataset=ROWS, **settings)


def resume_void(name, **settings):
    """Go on with a run that was killed after step 3, before the checkpoint of that step."""
    for path in Path(name, "checkpoints").glob("step=000003*"):
        path.rename(Path(name) / "lost")
    return run(name, resume=True, max_steps=4, **settings)


def journal(folder):
    return list(Journal(Path(folder) / "metrics.jsonl").entries())


def timeless(entries):
    return [{k: v for k, v in entry.items() if not k.startswith("time/")} for entry in entries]


def wandb_parts(folder):
    """Return the records of every part of a W&B run as W&B's own reader tells them, by time."""
    wandb = pytest.importorskip("wandb")
    reader = Path(wandb.__file__).parent / "bin" / "wandb-core"
    parts = []
    for file in Path(folder).glob("wandb/offline-run-*/run-*.wandb"):
        words = ["leet", "inspect", "--no-observability", "--json", "--run-file", file, file.parent]
        done = subprocess.run([reader, *words], capture_output=True, text=True, check=True)
        parts.append([json.loads(line) for line in done.stdout.splitlines()])
    return sorted(parts, key=lambda part: only(part, "run")[0]["start_time"])


def only(part, kind):
    return [record[kind] for record in part if record["type"] == kind]


def history(part):
    return [entry["item"] for entry in only(part, "history")]


def test_a_resumed_run_is_the_same_wandb_run_and_nothing_told_is_lost():
    pytest.importorskip("wandb")
    settings = {
        "output.trackers": ["wandb"],
        "output.project": "one",
        "loop.show_completions_every": 2,
    }
    run("told", **settings)
    first_id = json.loads(Path("told/wandb.json").read_text())["id"]
    resume_void("told", **settings)
    parts = wandb_parts("told")
    assert {part["run_id"] for p in parts for part in only(p, "run")} == {first_id}
    assert only(parts[0], "run")[0]["project"] == "one"
    assert only(parts[0], "run")[0]["display_name"] == "told"
    assert only(parts[0], "run")[0]["config"]["update"]["kl"]["coef"] == 0.1
    assert {"glob_name": "*", "step_metric": "step"}.items() <= only(parts[1], "metric")[1].items()
    numbers = [[item for item in history(part) if "train/kl" in item] for part in parts]
    assert [[item["step"] for item in part] for part in numbers] == [[1, 2, 3], [3, 4]]
    told_rows = [item["_step"] for part in parts for item in history(part)]
    assert told_rows == sorted(set(told_rows))
    for item in numbers[0][:2] + numbers[1]:
        entry = journal("told")[item["step"] - 1]
        assert {f"train/{k}": v for k, v in entry.items() if k != "step"}.items() <= item.items()
    assert numbers[0][2]["train/kl"] == numbers[1][0]["train/kl"]
    assert [only(part, "exit")[0]["exit_code"] for part in parts] == [0, 0]


def test_wandb_is_told_the_names_people_look_for_and_completions_as_text():
    pytest.importorskip("wandb")
    run("told", **{"output.trackers": ["wandb"], "loop.show_completions_every": 2, "max_steps": 2})
    (part,) = wandb_parts("told")
    names = set(history(part)[0])
    assert names >= {f"train/{name}" for name in ("kl", "kl_penalty", "grad_norm", "reward")}
    assert names >= {f"train/kl_k3/{what}" for what in ("mean", "max", "min")}
    assert names >= {"train/logp", "train/logp_ref"}
    (table,) = Path("told").glob("wandb/offline-run-*/files/media/table/*.json")
    rows = json.loads(table.read_text())["data"]
    assert [row[0] in {"0+1=", "1+1=", "2+1=", "3+1="} for row in rows] == [True] * 6
    assert all(isinstance(row[1], str) and isinstance(row[3], float) for row in rows)


@pytest.mark.slow
def test_telling_changes_nothing_in_a_run():
    pytest.importorskip("wandb")
    told, alone = run("told", **{"output.trackers": ["wandb"]}), run("alone")
    assert timeless(journal("told")) == timeless(journal("alone"))
    weights = [result.model / "model.safetensors" for result in (told, alone)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_run_that_fails_is_a_failed_wandb_run():
    pytest.importorskip("wandb")

    def breaks(prompts, completions, **columns):
        raise RuntimeError("broken")

    with pytest.raises(RewardError):
        run("failed", reward=breaks, **{"output.trackers": ["wandb"]})
    (part,) = wandb_parts("failed")
    assert only(part, "exit")[0]["exit_code"] == 1


ALONE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from klinic.evidence.files import Journal
from klinic.trackers.fail_safe import FailSafeTracker
from klinic.trackers.wandb import WandbTracker
from klinic.recipe.loading import from_keywords

Path("run").mkdir()
recipe = from_keywords(model="tiny", task="arithmetic", max_steps=9).recipe
tell = lambda text: print(text, flush=True)
inner = WandbTracker(recipe, Path("run"), tell)
events = Journal(Path("run/events.jsonl"))
tracker = FailSafeTracker(inner, name="W&B", print_line=tell, events=events)
tracker.begin(step=0)
tracker.log_metrics(1, {"kl": float("nan"), "loss": float("inf")})
if "kill" in sys.argv:
    for task in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((task / "stat").read_text().rpartition(")")[2].split()[1])
            ours = parent == os.getpid() and b"wandb-core" in (task / "cmdline").read_bytes()
        except OSError:
            continue
        if ours:
            os.kill(int(task.name), signal.SIGKILL)
    time.sleep(0.5)
    for step in range(2, 6):
        tracker.log_metrics(step, {"kl": 1.0})
tracker.close()
print("DONE", flush=True)
"""


def alone(*words, terminal=False, **environment):
    """Tell W&B in a process of its own, in a terminal of its own if asked; return its output."""
    main, other = pty.openpty() if terminal else (None, subprocess.DEVNULL)
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *words],
        stdin=other,
        stdout=subprocess.PIPE,
        stderr=other if terminal else subprocess.PIPE,
        env={**os.environ, **environment},
        text=True,
        check=False,
        timeout=110,
    )
    for end in (main, other) if terminal else ():
        os.close(end)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_without_a_login_nobody_is_asked_and_the_run_is_offline():
    pytest.importorskip("wandb")
    first, last = alone(terminal=True, WANDB_MODE="online")
    assert first == (
        "W&B: offline, since you are not logged in; run `wandb login`. "
        "Upload with: wandb sync run/wandb/offline-run-*"
    )
    assert last == "DONE"
    (part,) = wandb_parts("run")
    (item,) = history(part)
    assert (item["train/kl"], item["train/loss"]) == ("NaN", "Infinity")


@pytest.mark.slow
def test_a_wandb_process_that_dies_is_named_once():
    pytest.importorskip("wandb")
    _, failed, last = alone("kill")
    assert failed.startswith(
        "W&B failed at step 2 and receives no further metrics. The run continues"
    )
    assert last == "DONE"
    (event,) = Journal(Path("run/events.jsonl")).entries()
    assert (event["step"], event["tracker"]) == (2, "W&B")


@pytest.mark.slow
def test_a_key_that_is_none_is_said_and_stops_nothing():
    pytest.importorskip("wandb")
    failed, last = alone(WANDB_MODE="online", WANDB_API_KEY="short")
    assert "W&B failed at step 0" in failed
    assert "WANDB_API_KEY invalid" in failed
    assert last == "DONE"


def test_a_tracker_that_fails_in_the_middle_does_not_end_the_run(monkeypatch, capsys):
    told = []

    def fails(self, step, metrics):
        told.append(step)
        if step == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorBoardTracker, "log_metrics", fails)
    result = run("run", **{"output.trackers": ["tensorboard"]})
    assert (result.step, told) == (3, [1, 2])
    lines = [line for line in capsys.readouterr().out.splitlines() if "TensorBoard" in line]
    assert lines == [
        "TensorBoard failed at step 2 and receives no further metrics. The run continues, and "
        "metrics.jsonl has every step. OSError: [Errno 28] No space left on device"
    ]
    (event,) = Journal(Path("run/events.jsonl")).entries()
    assert event["event"] == "tracker failed"


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_made(
    name, tmp_path, monkeypatch
):
    # what W&B leaves in a working folder looks like a package
    (tmp_path / "path" / "wandb").mkdir(parents=True)
    found = PathFinder.find_spec
    monkeypatch.setattr(select, "find_spec", lambda name: found(name, [str(tmp_path / "path")]))
    with pytest.raises(MissingExtraError) as error:
        run("run", **{"output.trackers": [name]})
    assert str(error.value) == (
        f"output.trackers has {name}, which needs {name}. Install it with: "
        f'pip install "klinic[{name}]"'
    )
    assert not Path("run").exists()


def test_a_part_counts_on_beyond_the_one_before(tmp_path):
    path = tmp_path / "wandb.json"
    first_id, first_row = reserve_rows(path, num_rows=12)
    second_id, second_row = reserve_rows(path, num_rows=3)
    assert (second_id, first_row, second_row) == (first_id, 0, 12)
    assert reserve_rows(tmp_path / "other.json", num_rows=1)[0] != first_id
    path.write_text('{"id": 5}')
    with pytest.raises(EvidenceError, match="delete it to begin another"):
        reserve_rows(path, num_rows=1)


# not importorskip: trackio takes its folder when it is imported
@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_is_local_and_a_resumed_run_goes_on(monkeypatch, capsys):
    reached = []

    def network(*where, **_):
        reached.append(where)
        raise OSError("there is none")

    monkeypatch.setattr("socket.getaddrinfo", network)
    monkeypatch.setattr("socket.socket.connect", network)
    monkeypatch.setenv("TRACKIO_SPACE_ID", "somebody/space")
    settings = {"output.trackers": ["trackio"], "output.project": "one"}
    run("told", **settings)
    resume_void("told", **settings)
    from trackio.sqlite_storage import SQLiteStorage

    assert SQLiteStorage.get_runs("one") == ["told"]
    logs = SQLiteStorage.get_logs("one", "told")
    assert [log["step"] for log in logs] == [1, 2, 3, 3, 4]
    for log in logs:
        assert log["train/kl"] == journal("told")[log["step"] - 1]["kl"]
    assert reached == []
    assert list(Path("told/trackio").glob("one*.db"))
    printed = capsys.readouterr().out
    assert f"show with TRACKIO_DIR={Path('told/trackio').resolve()} trackio show" in printed
    assert "* " not in printed
    assert os.environ["TRACKIO_SPACE_ID"] == "somebody/space"
    assert "TRACKIO_DIR" not in os.environ
    with pytest.raises(ConfigError, match="first used in this process"):
        run("other", **settings)


@pytest.mark.parametrize(
    ("value", "on"),
    [
        ("wandb", {"wandb"}),
        ("tensorboard", {"tensorboard"}),
        (["wandb", "trackio"], {"wandb", "trackio"}),
        ("all", {"tensorboard", "wandb", "trackio"}),
        ("none", set()),
        (None, set()),
        ([], set()),
    ],
)
def test_report_to_names_all_that_are_told(value, on):
    output = from_keywords(model="tiny", task="arithmetic", report_to=value).recipe.output
    assert set(output.trackers) == on


@pytest.mark.parametrize("value", ["mlflow", ["wandb", 3], 1, {"wandb": True}])
def test_report_to_knows_no_others(value):
    with pytest.raises(ConfigError, match="use one of tensorboard, wandb, trackio, all or none"):
        from_keywords(model="tiny", task="arithmetic", report_to=value)


@pytest.mark.parametrize("name", ["a/b", "what?", "x" * 129])
def test_a_project_that_wandb_would_not_take_is_refused(name):
    with pytest.raises(ConfigError, match=r"output\.project is .*W&B refuses it"):
        from_keywords(model="tiny", task="arithmetic", **{"output.project": name})
