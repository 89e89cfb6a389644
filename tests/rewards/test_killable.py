"""A reward function in a process of its own: what it does there does not matter here."""

import asyncio
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from klinic.errors import ConfigError, FunctionError, RewardError
from klinic.rewards import killable, per_completion
from klinic.rewards.function import Reward
from klinic.rewards.runner import score
from rewards.rollouts import rollout

FILE = """
import os, re, sys, time

def length(completions):
    return [len(text) for text in completions]

def pids(completions, **columns):
    return [os.getpid()] * len(completions)

def hangs(completions, **columns):
    if any(text == "h" for text in completions):
        time.sleep(1000)
    return [1.0] * len(completions)

def holds_the_interpreter(completions, **columns):
    if "h" in completions:
        re.match("(a+)+$", "a" * 60 + "b")
    return [1.0] * len(completions)

def forks(completions, pid_file, **columns):
    if "h" in completions:
        child = os.fork()
        if not child:
            time.sleep(1000)
        with open(pid_file[0], "a") as file:
            file.write(f"{child} ")
        time.sleep(1000)
    return [1.0] * len(completions)

def forks_and_leaves(completions, **columns):
    if "x" in completions:
        if not os.fork():
            time.sleep(1000)
        os._exit(3)
    return [1.0] * len(completions)

def crashes(completions, **columns):
    if "x" in completions:
        os.kill(os.getpid(), 11)
    return [1.0] * len(completions)

def waits_for_all_children(completions, **columns):
    if not os.fork():
        os._exit(0)
    try:
        while True:
            os.wait()
    except ChildProcessError:
        return [1.0] * len(completions)

def talks(completions):
    print("from print")
    os.system("echo from a child")
    return [len(sys.stdin.read())] * len(completions)

def fails(completions):
    if "c" in completions:
        raise KeyError("gold")
    return [1.0] * len(completions)

async def later(completions):
    import asyncio
    await asyncio.sleep(0)
    return [2.0] * len(completions)

def heavy(completions):
    return [float(any(name in sys.modules for name in ("torch", "numpy", "pydantic", "asyncio")))]

def columns_of(answer, completions):
    return [float(a == {"a": [1, None]}) for a in answer]
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(FILE)
    return path


@pytest.fixture
def made(file):
    """Make functions of the file, and end their processes."""
    functions = []

    def make(name, timeout=20.0):
        functions.append(killable(f"{file}:{name}", timeout=timeout))
        return functions[-1]

    yield make
    for function in functions:
        function.close()


def judged(function, texts, **columns):
    rows = [rollout(t, index=i, prompt=f"p{i}", columns=columns) for i, t in enumerate(texts)]
    return score(rows, [Reward(name="mine", function=function)])


def gone(pid):
    for _ in range(500):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return True
        time.sleep(0.02)
    return False


def test_it_says_what_the_function_says(made):
    assert judged(made("length"), ["ab", "c", ""]).total.tolist() == [2.0, 1.0, 0.0]
    assert judged(made("later"), ["ab", "c"]).total.tolist() == [2.0, 2.0]
    assert judged(made("length"), []).total.tolist() == []


def test_one_process_serves_all_calls_and_is_not_this_one(made):
    function = made("pids")
    first, second = judged(function, ["a"]).total[0], judged(function, ["b"]).total[0]
    assert first == second != os.getpid()
    function.close()
    assert gone(int(first))
    assert judged(function, ["a"]).total[0] != first


def test_it_starts_with_next_to_nothing(made):
    assert judged(made("heavy"), ["a"]).total.tolist() == [0.0]


def test_a_module_is_found_as_it_is_here(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_a_module.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    assert judged(killable("rewards_of_a_module:length", timeout=20), ["ab"]).total[0] == 2
    import rewards_of_a_module

    by_name = killable(rewards_of_a_module.length, timeout=20)
    assert by_name.__name__ == "length"
    assert judged(by_name, ["abc"]).total[0] == 3


def test_a_file_is_found_again_from_another_folder(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    function = killable("my_rewards.py:length", timeout=20)
    monkeypatch.chdir("/")
    function.close()
    assert judged(function, ["ab"]).total[0] == 2


@pytest.mark.parametrize("name", ["hangs", "holds_the_interpreter"])
def test_what_hangs_has_no_reward_and_the_rest_has(made, name):
    scores = judged(made(name, timeout=1.0), ["a", "h", "b"])
    np.testing.assert_array_equal(scores.total, [1.0, np.nan, 1.0])
    assert scores.lost == {"timeouts": 1, "crashed": 0, "failed": 0}
    assert scores.num_missing == 1


def test_what_it_forked_is_killed_as_well(made, tmp_path):
    pids = tmp_path / "pids"
    scores = judged(made("forks", timeout=1.0), ["a", "h"], pid_file=str(pids))
    assert scores.lost["timeouts"] == 1
    children = [int(pid) for pid in pids.read_text().split()]
    assert len(children) == 2  # with the others, and alone
    assert all(gone(child) for child in children)


@pytest.mark.parametrize("name", ["crashes", "forks_and_leaves"])
def test_what_crashes_it_has_no_reward_and_the_rest_has(made, name):
    start = time.monotonic()
    scores = judged(made(name, timeout=100.0), ["a", "x", "b"])
    np.testing.assert_array_equal(scores.total, [1.0, np.nan, 1.0])
    assert scores.lost == {"timeouts": 0, "crashed": 1, "failed": 0}
    assert time.monotonic() - start < 90  # a crash is seen as it happens, not when time is over


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("hangs", "h", "did not return within 0.2 s"),
        ("crashes", "x", r"ended its process \(signal 11: Segmentation fault\)"),
    ],
)
def test_where_all_are_lost_the_run_stops(made, name, text, told):
    with pytest.raises(RewardError, match=rf"mine {told} on each of 3 .*at completion 0 \(row 1 "):
        judged(made(name, timeout=0.2), [text] * 3)


def test_it_gives_up_after_one_of_each_of_some_prompts(made, monkeypatch):
    monkeypatch.setattr("klinic.rewards.subprocess_reward.MAX_LOST_IN_A_ROW", 2)
    rows = [rollout("h", index=0, prompt="p0")] * 3 + [rollout("a", index=1, prompt="p1")]
    function = made("hangs", timeout=1.0)
    scores = score(rows, [Reward(name="mine", function=function)])
    assert scores.lost["timeouts"] == 3
    with pytest.raises(RewardError, match="on each of 2 completions"):
        judged(function, ["h"] * 64)


def test_an_exception_there_is_an_error_here_with_its_place(made):
    with pytest.raises(RewardError, match=r"mine raised KeyError: 'gold' \(my_rewards.py, line"):
        judged(made("fails"), ["a", "b", "c"])
    with pytest.raises(RewardError, match=r"first at completion 2 \(row 3 of the dataset"):
        judged(made("fails"), ["a", "b", "c"])


def test_a_function_may_wait_for_all_of_its_children(made):
    assert judged(made("waits_for_all_children"), ["a"]).total.tolist() == [1.0]


def test_what_it_prints_goes_to_standard_error_and_it_reads_nothing(made, capfd):
    assert judged(made("talks"), ["a"]).total.tolist() == [0.0]
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "from print\n" in printed.err
    assert "from a child\n" in printed.err


def test_columns_go_there_as_json(made):
    scores = judged(made("columns_of"), ["a"], answer={"a": (np.int64(1), None)})
    assert scores.total.tolist() == [1.0]


@pytest.mark.parametrize(
    ("value", "told"),
    [(b"gold", "bytes"), (datetime.date(2020, 1, 1), "date"), ({1: 2}, "keys that are not text")],
)
def test_what_json_does_not_know_is_named_with_column_and_row(made, value, told):
    rows = [rollout("a", index=4, answer="x"), rollout("b", index=5, answer=value)]
    with pytest.raises(RewardError, match=rf"column 'answer', which holds {told}.*\(row 6 "):
        score(rows, [Reward(name="mine", function=made("length"))])


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("my_rewards.py:lenth", "has no function 'lenth'. It has: "),
        ("nowhere.py:length", "nowhere.py is not a file"),
        ("no_such_module:length", "cannot be imported: ModuleNotFoundError"),
        ("leaves.py:length", r"leaves.py:length ended its process \(exit code 4\) during import"),
        ("exits.py:length", "cannot be imported: SystemExit: 4"),
    ],
)
def test_a_function_that_is_not_there_is_said_before_the_run(
    file, target, told, tmp_path, monkeypatch
):
    (tmp_path / "leaves.py").write_text("import os\nos._exit(4)")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(4)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FunctionError, match=told):
        killable(target, timeout=20)


def test_an_argument_that_nobody_can_fill_is_said(made):
    with pytest.raises(RewardError, match="columns_of requires 'answer'"):
        judged(made("columns_of"), ["a"])


def test_a_function_that_only_lives_here_is_refused():
    def inner(completions): ...

    for function in (inner, lambda **_: [], json.JSONEncoder().encode):
        with pytest.raises(FunctionError, match="which imports it by name"):
            killable(function, timeout=1)


def test_no_time_at_all_is_refused():
    with pytest.raises(ConfigError, match="timeout is 0"):
        killable("json:dumps", timeout=0)


def test_a_file_of_the_users_is_not_taken_for_pythons(file, tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path)
    assert judged(killable("my_rewards.py:length", timeout=20), ["ab"]).total[0] == 2


@pytest.mark.parametrize("busy", [False, True])
def test_it_dies_with_its_parent_even_while_it_hangs(file, tmp_path, busy):
    """The parent is killed with -9; the function holds the interpreter if busy."""
    script = tmp_path / "parent.py"
    call = "function(prompts=['p'], completions=['h'])" if busy else "sys.stdin.read()"
    script.write_text(
        "import sys\nfrom klinic.rewards import killable\n"
        f"pids = killable({f'{file}:pids'!r}, timeout=1000)\n"
        f"function = killable({f'{file}:holds_the_interpreter'!r}, timeout=1000)\n"
        "print(int(pids(prompts=['p'], completions=['a'])[0]),"
        " function._process._process.pid, flush=True)\n"
        f"{call}\n"
    )
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        time.sleep(0.3)  # into the call
        assert not any(map(gone_now, workers))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.communicate()
    assert all(map(gone, workers))
    for worker in workers:
        with pytest.raises(ProcessLookupError):  # nobody is left in its group
            wait_for_empty_group(worker)


def gone_now(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def wait_for_empty_group(group):
    for _ in range(500):
        os.killpg(group, 0)
        time.sleep(0.02)


@per_completion(concurrency=2)
async def one(completion):
    if completion == "f":
        raise KeyError("gold")
    return 1.0


def test_what_failed_there_is_counted_here(monkeypatch):
    function = killable(one, timeout=20)
    scores = judged(function, ["a", "f"])
    assert scores.lost == {"timeouts": 0, "crashed": 0, "failed": 1}
    assert asyncio.run(one(prompts=["p"], completions=["a"])) == [1.0]
