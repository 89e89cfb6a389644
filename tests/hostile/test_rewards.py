"""Whatever a reward does to its process, the run is right or a sentence names the reward.

A sample runs in CI, through the code that scores a step. The whole, as `klinic train` in processes
of its own, is slow: most of them are forked from one that has torch already, with nobody to
supervise them.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commands import klinic

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
TESTS = Path(__file__).parents[1]

GOES_ON = {
    "fork_return": "the reward fork_return forked the process and returned in both",
    "fork_leave": "",
    "print100": "A",
    "chdir": "the reward chdir changed the working directory of the process: restored",
    "async_chdir": "the reward async_chdir changed the working directory",
    "sigs": "the reward sigs changed the handler of SIGTERM",
    "nan": "",
    "gen": "",
    "huge": "",
    "stdoutclose": "the reward stdoutclose changed sys.std..., which it closed,",
    "thread": "",
}
STOPS = {
    "exit0": r"called os._exit\(0\), first at completion 0 ",
    "exit3": r"called os._exit\(3\), first at completion 0 ",
    "async_exit": r"called os._exit\(0\), first at completion 0 ",
    "async_cancel": "raised CancelledError",
    "sysexit": "raised SystemExit: 0",
    "no_exception": "raised NoException: neither Exception nor SystemExit",
    "leak": "raised MemoryError",
    "closefds": r"closed file descriptors that it did not open \(\d+\), and the run needs them",
    "close_stdout": r"closed file descriptors that it did not open \(1\), and the run needs them",
    "esc": "raised ValueError: ",
    "strs": r"returned '1' \(str\)",
    "short": "returned 1 value for 2 completions",
    "endless": "returned more values for 1 completion",
    "huge_list": "returned 1000000000000 values for 1 completion",
    "digits": r"returned a value without a text \(dict\)",
    "cplx": r"returned 1j \(complex\)",
    "npbig": r"returned array\(\[1., 1.\]\) \(ndarray\)",
    "rec": "raised RecursionError",
    "stdin": "raised EOFError",
    "badmsg": r"raised NoTextError: \(no text: its __str__ raised RuntimeError\)",
    "badvalue": r"returned <NoRepr instance at 0x[0-9a-f]+> \(NoRepr\)",
    "longmsg": "raised ValueError: x{500}[.]{3}",
}


@pytest.fixture(scope="module")
def answers():
    """What came of each reward, in a process of its own."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "hostile.score_in_forks", *GOES_ON, *STOPS],
        cwd=TESTS,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=110,
    )
    return json.loads(ended.stdout)


@pytest.mark.parametrize("name", GOES_ON)
def test_scoring_goes_on_and_the_process_is_as_it_was(answers, name):
    answer = answers[name]
    assert answer["code"] == 5, answer
    assert answer["said"].count("WELL\n") == 1  # and no second process that goes on
    assert re.search(GOES_ON[name], answer["said"])
    assert "Error" not in answer["said"]


@pytest.mark.parametrize("name", STOPS)
def test_scoring_stops_and_the_reward_is_named(answers, name):
    answer = answers[name]
    assert answer["code"] == 5, answer
    assert re.search(rf"^\w+Error: the reward {name} {STOPS[name]}", answer["said"], re.MULTILINE)
    assert "WELL" not in answer["said"]
    assert answer["size"] < 2000


SMALL = (
    *("loop.max_steps=4", "loop.eval_every=0", "loop.eval_prompts=1", "loop.checkpoint_every=2"),
    *("loop.prompts_per_step=2", "loop.group_size=4", "kl.coef=0.05", "sampling.max_new_tokens=4"),
    *("output.trackers=[]", "learner.learning_rate=1e-3", "warm_start.steps=5"),
)


def arguments(name, timeout=None):
    """Return a run with a reward of the file, in its process or in one of its own."""
    entry = {"function": f"{TESTS / 'hostile' / 'bad_rewards.py'}:{name}"}
    rewards = json.dumps([entry if timeout is None else {**entry, "timeout": timeout}])
    return ["train", "recipe.yaml", f"rewards={rewards}", "output.dir=run", *SMALL]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "recipe.yaml").write_text("{model: tiny, task: arithmetic}")
    return tmp_path


def steps_of(folder):
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [entry["step"] for entry in map(json.loads, lines) if "loss" in entry]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("torchpatch", 0, "the reward torchpatch changed torch's default dtype of the process"),
        ("torchpatch2", 0, "the reward torchpatch2 changed torch.Tensor.backward of the process"),
        ("fork_return", 0, "the reward fork_return forked the process"),
        ("exit0", 2, "RewardError: the reward exit0 called os._exit(0), first at completion 0"),
        ("closefds", 2, "the reward closefds closed file descriptors that it did not open"),
    ],
)
def test_training_in_this_process(folder, name, code, said):
    ended = klinic(*arguments(name), cwd=folder, timeout=110)
    assert ended.returncode == code, ended.stderr
    assert said in ended.stderr
    if code == 0:
        assert steps_of(folder) == [1, 2, 3, 4]


def forked(folder, name, timeout=None):
    """Return exit code and output of the command in a process that has torch already."""
    ended = klinic(*arguments(name, timeout), cwd=folder, timeout=300)
    return ended.returncode, (ended.stdout + ended.stderr)[-4000:]


def supervised(folder, name, limit=300):
    """Return exit code and output of the command as a user starts it."""
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "klinic.cli", *arguments(name)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            time.sleep(1)
            process.send_signal(signal.SIGTERM)
            code = f"hung, then {process.wait(60)}"
    return code, log.read_bytes()[-4000:].decode(errors="replace")


def weights_of(folder):
    newest = max((folder / "run" / "checkpoints").glob("step=*"))
    return newest.name, (newest / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def well(tmp_path_factory):
    """The weights of a run whose reward behaves: those of every run that goes on."""
    folder = tmp_path_factory.mktemp("well")
    (folder / "recipe.yaml").write_text("{model: tiny, task: arithmetic}")
    code, said = forked(folder, "well_behaved")
    assert code == 0, said
    return weights_of(folder)


SAME = ("fork_return", "fork_leave", "print100", "chdir", "async_chdir", "sigs", "stdoutclose")
SAME += ("thread", "torchpatch", "torchpatch2")
OTHER = ("gen", "nan", "huge")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.torch
@pytest.mark.parametrize("name", [*SAME, *OTHER])
def test_a_whole_run_goes_on(folder, well, name):
    code, said = forked(folder, name)
    assert code == 0, said
    assert steps_of(folder) == [1, 2, 3, 4]
    assert "Traceback" not in said
    assert "\x1b" not in said
    if name in SAME:
        assert weights_of(folder) == well


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.torch
@pytest.mark.parametrize("name", STOPS)
def test_a_whole_run_stops_and_the_reward_is_named(folder, name):
    code, said = forked(folder, name)
    assert code == 2, said
    assert f"the reward {name} " in said
    assert "Traceback" not in said
    assert "\x1b" not in said


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.torch
def test_a_whole_run_that_is_ended_from_c_is_no_success(folder):
    code, said = supervised(folder, "exit_in_c")
    assert code == 2, said
    assert "UnfinishedError: the process of the run exited with code 0 after step" in said


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.torch
def test_a_whole_run_that_hangs_ends_when_it_is_stopped(folder):
    code, said = supervised(folder, "hang", limit=100)
    assert code in {"hung, then 130", "hung, then 143"}
    assert "Traceback" not in said


# an end of its process is counted, and another process goes on
APART = {"hang": 2, "exit0": 0, "exit3": 0, "exit_in_c": 0, "chdir": 0, "closefds": 2, "thread": 0}
APART |= {"torchpatch": 0, "fork_return": 0, "fork_leave": 0, "badmsg": 2, "sysexit": 2, "leak": 2}
APART |= {"endless": 2, "stdoutclose": 0, "no_exception": 2, "longmsg": 2}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.torch
@pytest.mark.parametrize("name", APART)
def test_a_whole_run_with_the_reward_in_a_process_of_its_own(folder, name):
    code, said = forked(folder, name, timeout=3 if name == "hang" else 100)
    assert code == APART[name], said
    assert "Traceback" not in said
    if code:
        assert f"the reward {name} " in said
    else:
        assert steps_of(folder) == [1, 2, 3, 4]
