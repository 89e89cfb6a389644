"""Whatever a reward function does: training goes on, or an error names it and the completion.

Each case misbehaves at completion 1 alone, in this process and in one of its own.
"""

import json
import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from klinic.errors import RewardError
from klinic.rewards import killable
from klinic.rewards.function import Reward
from klinic.rewards.runner import score
from klinic.rewards.scores import reward_statistics, with_rewards
from rewards.rollouts import rollout

if find_spec("torch"):  # now, since importing it can take longer than a test may
    import torch

    from klinic import train as klinic_train

pytestmark = pytest.mark.timeout(240)
FILE = """
import json, os, pathlib, sys, time

class Case:
    def __init__(self, doing):
        self.doing = doing

    def __call__(self, prompts, completions, **columns):
        good = [float(len(text)) for text in completions]
        return self.doing(good, bad_in(prompts, completions))

def bad_in(prompts, completions):
    # what a model says is not known before: the second one of the first call is the bad one, and
    # a file remembers it for a process that starts again
    memory = pathlib.Path(__file__).with_name("bad.json")
    if not memory.exists():
        memory.write_text(json.dumps([prompts[1], completions[1]]))
    pairs = [[prompt, text] for prompt, text in zip(prompts, completions)]
    return [index for index, pair in enumerate(pairs) if pair == json.loads(memory.read_text())]

def put(value):
    def doing(good, bad):
        return [value if index in bad else number for index, number in enumerate(good)]
    return Case(doing)

def when_bad(action):
    def doing(good, bad):
        return action(good, bad) if bad else good
    return Case(doing)

def raising(good, bad):
    raise KeyError("gold")

none = put(None)
nan = put(float("nan"))
infinite = put(float("inf"))
huge = put(1e308)
minus_huge = put(-1e308)
beyond = put(10**400)
text = put("1.0")
dictionary = put({"reward": 1.0})
short = Case(lambda good, bad: [n for i, n in enumerate(good) if i not in bad])
no_list = when_bad(lambda good, bad: 1.0)
raises = when_bad(raising)
leaves = when_bad(lambda good, bad: sys.exit(3))
hangs = when_bad(lambda good, bad: time.sleep(1000))
crashes = when_bad(lambda good, bad: os._exit(3))
out_of_memory = when_bad(lambda good, bad: os.kill(os.getpid(), 9))
"""

GOES_ON = {
    "none": "reward/missing",
    "nan": "reward/nonfinite",
    "infinite": "reward/nonfinite",
    "huge": "reward/nonfinite",
    "minus_huge": "reward/nonfinite",
    "beyond": "reward/nonfinite",
}
GOES_ON_APART = {
    "hangs": "reward/timeouts",
    "crashes": "reward/crashed",
    "out_of_memory": "reward/crashed",
}
STOPS = {
    "text": r"returned '1\.0' \(str\)",
    "dictionary": r"returned \{'reward': 1\.0\} \(dict\)",
    "short": "returned 0 values for 1 completion",
    "no_list": r"returned 1\.0 \(float\), not a list",
    "raises": "raised KeyError: 'gold'",
    "leaves": "raised SystemExit: 3",
}
WHERE = ["here", "apart"]
GOING_ON = [(name, where) for name in GOES_ON for where in WHERE]
GOING_ON += [(name, "apart") for name in GOES_ON_APART]
STOPPING = [(name, where) for name in STOPS for where in WHERE]

ROWS = [rollout(text, index=i // 2, prompt=f"p{i // 2}") for i, text in enumerate(["a", "bb"] * 2)]


@pytest.fixture
def function(tmp_path):
    """Make a function of the file, here or in a process of its own."""
    made = []

    def make(name, where):
        path = tmp_path / "misbehaving.py"
        path.write_text(FILE)
        if where == "apart":
            made.append(killable(f"{path}:{name}", timeout=1.5))
            return made[-1]
        namespace = {"__file__": str(path)}
        exec(path.read_text(), namespace)  # noqa: S102 - the text above
        namespace[name].__name__ = name
        return namespace[name]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(("name", "where"), GOING_ON)
def test_scoring_goes_on_and_counts(function, name, where):
    scores = score(ROWS, [Reward(name=name, function=function(name, where))])
    np.testing.assert_array_equal(scores.total, [1.0, np.nan, 1.0, 2.0])
    found = reward_statistics(scores)
    assert found["reward/missing"] == 1
    assert found[(GOES_ON | GOES_ON_APART)[name]] == 1
    assert found["reward"] == pytest.approx(4 / 3)
    assert math.isfinite(found["reward_std"])


@pytest.mark.parametrize(("name", "where"), STOPPING)
def test_scoring_stops_and_names_function_and_completion(function, name, where):
    with pytest.raises(RewardError, match=rf"^the reward {name} {STOPS[name]}") as caught:
        score(ROWS, [Reward(name=name, function=function(name, where))])
    assert ", first at completion 1 (row 1 of the dataset, sample 0)." in str(caught.value)


@pytest.mark.parametrize("advantage", ["none", "group_mean", "leave_one_out", "group_std", "batch"])
@pytest.mark.parametrize("large", [1e308, -1e308, 1e12])
def test_no_number_spoils_the_advantages_of_its_group(advantage, large):
    from klinic.evidence.rollout import flatten_rollouts

    rows = [rollout("a", index=0), rollout("b", index=0), rollout("c", index=0)]
    scores = score(rows, [Reward(name="r", function=lambda **_: [large, 0.0, 1.0])])
    record = with_rewards(flatten_rollouts(rows, step=1), scores, advantage=advantage)
    assert np.isfinite(record.advantage).all()
    assert np.isfinite(record.advantage.astype(np.float32)).all()
    assert all(math.isfinite(value) for value in reward_statistics(scores).values())
    if abs(large) > 1e12:
        assert record.advantage[0] == 0
        assert record.advantage[2] - record.advantage[1] > 0.5


def train(function, folder):
    """Return the metrics of a real run of two steps on the tiny model."""
    threads = torch.get_num_threads()
    try:
        klinic_train(
            model="tiny",
            reward_funcs=[function],
            train_dataset=[{"prompt": f"{n}+{m}="} for n in range(2) for m in range(2)],
            max_steps=2,
            prompts_per_step=2,
            group_size=3,
            max_new_tokens=8,
            learning_rate=1e-3,
            kl_coef=0.1,
            threads=1,
            **{"output.dir": str(folder), "output.trackers": [], "output.doctor": "none"},
        )
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(mode=False)
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.torch
@pytest.mark.parametrize(("name", "where"), GOING_ON[::2])
def test_training_goes_on_and_counts(function, name, where, tmp_path):
    metrics = train(function(name, where), tmp_path / "run")
    assert [entry["step"] for entry in metrics] == [1, 2]
    first = metrics[0]
    assert first["reward/missing"] == 1
    assert first[(GOES_ON | GOES_ON_APART)[name]] == 1
    for entry in metrics:
        assert entry["discarded"] == 0
        # what is not finite is written as null
        numbers = ("loss", "reward", "reward_std", "advantage/max", "grad_norm", "reward/penalized")
        assert all(isinstance(entry[number], float) for number in numbers), entry
        assert entry["advantage/max"] < 100


@pytest.mark.torch
@pytest.mark.parametrize(("name", "where"), STOPPING[::3])
def test_training_stops_and_names_function_and_completion(function, name, where, tmp_path):
    with pytest.raises(RewardError, match=rf"^the reward {name} {STOPS[name]}") as caught:
        train(function(name, where), tmp_path / "run")
    assert ", first at completion 1 (row " in str(caught.value)
    assert " of the dataset, sample 1)." in str(caught.value)
