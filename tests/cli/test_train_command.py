"""`klinic train` as a process: what cannot be used is named, and nobody reads a traceback."""

import itertools
import os
import shlex
import sys

import pytest

from commands import klinic
from recipe.malformed import malformed

NUM_RECIPES = 45
AT_ONCE = 5


def train(folder, *arguments):
    env = {**os.environ, "KLINIC_CACHE": str(folder / "cache")}
    return klinic("train", *arguments, cwd=folder, timeout=100, env=env)


def refused(done):
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.split(":")[0].endswith("Error")
    return done.stderr


BAD = list(malformed(NUM_RECIPES, seed=3))


@pytest.mark.parametrize("start", range(0, NUM_RECIPES, AT_ONCE))
def test_a_malformed_recipe_is_refused_and_its_key_is_named(tmp_path, start):
    for bad in itertools.islice(BAD, start, start + AT_ONCE):
        (tmp_path / "bad.yaml").write_bytes(bad.content)
        message = refused(train(tmp_path, "bad.yaml"))
        assert bad.key is None or bad.key in message
        assert bad.nearest is None or bad.nearest in message


GOOD = """
model: tiny
data: {path: rows.jsonl}
rewards: ["rewards.py:one"]
sampling: {max_new_tokens: 4}
loop: {max_steps: 1, prompts_per_step: 1, group_size: 2}
output: {dir: out}
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("rows", "reward", "says"),
    [
        ('{"question": "a"}', "return [1.0, 1.0]", "row 1 has no `prompt`"),
        ('{"prompt": "a"}\n{"prompt": null}', "return [1.0, 1.0]", "row 2: `prompt` is None"),
        ('{"prompt": "a"}', "return [1.0]", "the reward one returned 1 value for 2"),
        ('{"prompt": "a"}', "import sys; sys.exit(3)", "the reward one raised SystemExit: 3"),
        ('{"prompt": "a"}', "return completions[0].nothing", "AttributeError"),
    ],
)
def test_a_bad_row_or_reward_is_named(tmp_path, rows, reward, says):
    (tmp_path / "recipe.yaml").write_text(GOOD)
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "rewards.py").write_text(f"def one(prompts, completions, **_):\n    {reward}\n")
    assert says in refused(train(tmp_path, "recipe.yaml"))


@pytest.mark.torch
def test_familiar_flags_are_taken_and_echoed(tmp_path):
    (tmp_path / "recipe.yaml").write_text(GOOD)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}')
    (tmp_path / "rewards.py").write_text(
        "def one(prompts, completions, **_):\n    return [float(len(c)) for c in completions]\n"
    )
    done = train(tmp_path, "recipe.yaml", "--kl-beta", "0.02", "--num-generations", "3")
    assert done.returncode == 0, done.stderr
    assert "kl: coef=0.02\n" in done.stdout
    assert "null" not in done.stdout
    assert "kl_beta is written kl.coef here: 0.02" in done.stdout
    assert "Sizes: 1 prompt x 3 completions = 3 per step" in done.stdout
    assert "KL unbiased: The token-level gradient of KL(policy || reference)" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("Step 1 |")]
    parts = [part.split(":")[0] for part in line.split(" | ")]
    assert parts == ["Step 1", "Loss", "Grad norm", "Reward", "KL", "KL penalty"]
    saved = (tmp_path / "out" / "recipe.yaml").read_text()
    assert "coef: 0.02" in saved


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_the_commands_at_the_end_work(tmp_path):
    (tmp_path / "recipe.yaml").write_text(GOOD)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}')
    (tmp_path / "rewards.py").write_text(
        "def one(prompts, completions, **_):\n    return [float(len(c)) for c in completions]\n"
    )
    done = train(tmp_path, "recipe.yaml")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.rpartition("\nNext:\n")[2].splitlines()
    commands = [line.strip().split("  ")[0] for line in lines]
    assert [command.split()[1] for command in commands] == ["report", "diagnose", "eval", "export"]
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "klinic"
        ended = klinic(*words, cwd=tmp_path, timeout=100)
        assert ended.returncode == 0, (command, ended.stdout, ended.stderr)


@pytest.mark.skipif("torch" in sys.modules, reason="torch is installed here")
def test_without_torch_a_good_recipe_says_what_to_install(tmp_path):
    from importlib.util import find_spec

    if find_spec("torch") is not None:
        pytest.skip("torch is installed here")
    (tmp_path / "recipe.yaml").write_text(GOOD)
    assert 'pip install "klinic[train]"' in refused(train(tmp_path, "recipe.yaml"))
