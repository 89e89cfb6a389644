"""A judge of one completion: many at once, each tried again, and none of them lost in silence."""

import asyncio
import threading
import time

import numpy as np
import pytest

from klinic.errors import ConfigError, RewardError
from klinic.rewards import concurrency, per_completion
from klinic.rewards.function import Reward
from klinic.rewards.runner import score
from rewards.rollouts import rollout

ROWS = [rollout(text, index=i, answer=f"{i}") for i, text in enumerate("abcdef")]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(concurrency, "FIRST_BACKOFF", 0.001)


def judged(judge, rows=ROWS, **how):
    return score(rows, [Reward(name="judge", function=per_completion(**how)(judge))])


class Counting:
    """How many are inside at once."""

    def __init__(self):
        self.now = self.most = 0
        self._lock = threading.Lock()

    def __enter__(self):
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *error):
        with self._lock:
            self.now -= 1


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("kind", ["async", "threads"])
def test_so_many_at_once_and_answers_in_order(concurrency, kind):
    inside = Counting()

    async def waits(prompt, completion, answer):
        with inside:
            while inside.most < concurrency:  # where it never comes to that, tries run out
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1 if completion == "a" else 0.02)
        return float(answer)

    def sleeps(prompt, completion, answer):
        with inside:
            while inside.most < concurrency:
                time.sleep(0.01)
            time.sleep(0.1 if completion == "a" else 0.02)
        return float(answer)

    scores = judged(waits if kind == "async" else sleeps, concurrency=concurrency, timeout=10)
    assert scores.total.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert inside.most == concurrency


def test_the_judge_is_given_what_it_names_of_its_own_row():
    seen = []

    def names_some(completion, answer, scale=1.0):
        seen.append((completion, answer, scale))
        return 0.0

    def takes_all(prompt, completion, **columns):
        assert columns == {"answer": "0", "completion_ids": [97]}
        return 0.0

    judged(names_some, ROWS[:2], concurrency=1)
    assert seen == [("a", "0", 1.0), ("b", "1", 1.0)]
    judged(takes_all, ROWS[:1])


def test_an_argument_nobody_can_fill_is_said_at_once():
    tried = []

    def asks(completion, gold):
        tried.append(1)

    with pytest.raises(RewardError, match="the reward asks requires 'gold'"):
        judged(asks)
    assert tried == []


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_one_that_raises_is_tried_again(retries):
    tries = dict.fromkeys("abcdef", 0)

    async def flaky(completion):
        tries[completion] += 1
        if completion == "c" and tries["c"] <= 2:
            raise ConnectionError("gone")
        return 1.0

    scores = judged(flaky, retries=retries)
    failed = retries < 2
    assert tries == {**dict.fromkeys("abdef", 1), "c": min(3, retries + 1)}
    assert scores.lost["failed"] == failed
    np.testing.assert_array_equal(
        np.isnan(scores.total), [text == "c" and failed for text in tries]
    )


@pytest.mark.parametrize("kind", ["async", "threads"])
def test_one_that_hangs_is_given_up(kind):
    async def waits(completion):
        if completion == "b":
            await asyncio.sleep(1000)
        return 1.0

    def sleeps(completion):
        if completion == "b":
            time.sleep(60)
        return 1.0

    start = time.monotonic()
    scores = judged(waits if kind == "async" else sleeps, retries=1, timeout=0.5)
    assert scores.lost == {"timeouts": 0, "crashed": 0, "failed": 1}
    assert np.isnan(scores.total).tolist() == [False, True, False, False, False, False]
    assert time.monotonic() - start < 30


def test_no_opinion_is_no_failure():
    scores = judged(lambda completion: None if completion == "a" else 1.0)
    assert (scores.num_missing, scores.lost["failed"]) == (1, 0)


@pytest.mark.parametrize(
    "error", [ConnectionError("gone"), TimeoutError("mine"), SystemExit("out")]
)
@pytest.mark.parametrize("kind", ["async", "threads"])
def test_where_all_fail_the_last_error_is_told(error, kind):
    async def breaks(completion):
        raise error

    def breaks_in_a_thread(completion):
        raise error

    told = (
        rf"judge failed on all of 6 completions in 2 tries each, .*{type(error).__name__}: {error}"
    )
    with pytest.raises(RewardError, match=told):
        judged(breaks if kind == "async" else breaks_in_a_thread, retries=1)


def test_what_is_no_number_is_named_with_its_row():
    with pytest.raises(RewardError, match=r"returned 'good' \(str\).*completion 2 \(row 3 "):
        judged(lambda completion: "good" if completion == "c" else 1.0)


def test_it_works_where_an_event_loop_runs_already():
    async def judge(completion):
        await asyncio.sleep(0)
        return 1.0

    async def notebook():
        return judged(judge)

    assert asyncio.run(notebook()).total.tolist() == [1.0] * 6


def test_an_object_with_an_asynchronous_call_is_a_judge():
    class Judge:
        async def __call__(self, completion):
            return 2.0

    assert judged(Judge(), ROWS[:2]).total.tolist() == [2.0, 2.0]


def test_pauses_double_differ_and_end():
    pauses = [[concurrency._backoff_seconds(tries, 0.0) for _ in range(50)] for tries in range(3)]
    for tries, found in enumerate(pauses):
        assert len(set(found)) > 1
        low, high = (concurrency.FIRST_BACKOFF * 2**tries * factor for factor in (0.5, 1.5))
        assert low <= min(found) <= max(found) <= high
    assert concurrency._backoff_seconds(0, 7.0) == 7.0
    assert concurrency._backoff_seconds(10_000 % 60, 1e9) == concurrency.MAX_BACKOFF


@pytest.mark.parametrize("how", [{"concurrency": 0}, {"retries": -1}, {"timeout": 0}])
def test_impossible_settings_are_refused(how):
    with pytest.raises(ConfigError, match=f"{next(iter(how))} is"):
        per_completion(**how)
