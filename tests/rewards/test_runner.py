"""Reward functions are called once a step, and nothing they do passes for a reward."""

import asyncio
import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klinic.errors import ConfigError, RewardError
from klinic.rewards.function import Reward
from klinic.rewards.runner import score
from rewards.rollouts import rollout

NAN = math.nan
ROLLOUTS = [rollout("ab", answer="ab"), rollout("c", answer="d")]
MAYBE = st.none() | st.floats(-10, 10)


def correct(prompts, completions, answer, **kwargs):
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def length(completions):
    return [len(c) for c in completions]


def returning(*values, name="fixed", weight=1.0):
    def function(**kwargs):
        return list(values)

    return Reward(name=name, function=function, weight=weight)


def test_the_total_is_the_weighted_sum_of_the_parts():
    rewards = [
        Reward(name="correct", function=correct, weight=2.0),
        Reward(name="length", function=length, weight=-0.5),
    ]
    scores = score(ROLLOUTS, rewards)
    assert scores.total.tolist() == [1.0, -0.5]
    assert {name: part.tolist() for name, part in scores.parts.items()} == {
        "correct": [1.0, 0.0],
        "length": [2.0, 1.0],
    }
    assert (scores.num_missing, scores.num_nonfinite) == (0, 0)


@given(st.lists(st.tuples(MAYBE, MAYBE), min_size=1, max_size=6))
def test_a_completion_has_a_total_exactly_where_a_function_gave_a_number(values):
    rows = [rollout("a") for _ in values]
    first, second = zip(*values, strict=True)
    scores = score(rows, [returning(*first, weight=3.0), returning(*second)])
    for (a, b), total in zip(values, scores.total, strict=True):
        if a is None and b is None:
            assert np.isnan(total)
        else:
            assert total == pytest.approx(3.0 * (a or 0.0) + (b or 0.0))
    assert scores.num_missing == sum(a is None and b is None for a, b in values)


def test_numbers_that_are_not_finite_are_none_given_and_counted():
    scores = score(ROLLOUTS, [returning(math.inf, 0.5), returning(NAN, None)])
    np.testing.assert_array_equal(scores.total, [NAN, 0.5])
    np.testing.assert_array_equal(scores.parts["fixed"], [NAN, 0.5])
    np.testing.assert_array_equal(scores.parts["fixed_2"], [NAN, NAN])
    assert (scores.num_missing, scores.num_nonfinite) == (1, 2)


def test_a_function_of_weight_zero_watches_and_gives_no_total():
    scores = score(ROLLOUTS, [returning(1.0, None), returning(5.0, 5.0, name="seen", weight=0.0)])
    np.testing.assert_array_equal(scores.total, [1.0, NAN])
    assert scores.parts["seen"].tolist() == [5.0, 5.0]
    assert scores.num_missing == 1


def test_functions_of_the_same_name_are_told_apart():
    rewards = [returning(0.0, 0.0, name=name) for name in ("a", "a", "a_2", "a")]
    assert list(score(ROLLOUTS, rewards).parts) == ["a", "a_2", "a_2_2", "a_3"]


def test_each_function_is_called_once_for_all_completions():
    calls = []

    def judge(completions):
        calls.append(completions)
        return [0.0, 0.0]

    score(ROLLOUTS, [Reward(name="judge", function=judge)])
    assert calls == [["ab", "c"]]


def test_what_one_function_does_to_its_lists_the_next_does_not_see():
    def destroy(completions):
        completions[:] = ["", ""]
        return [0.0, 0.0]

    rewards = [Reward(name="destroy", function=destroy), Reward(name="length", function=length)]
    assert score(ROLLOUTS, rewards).parts["length"].tolist() == [2.0, 1.0]


def test_an_asynchronous_function_is_waited_for():
    async def judge(completions):
        return [0.25, 0.5]

    assert score(ROLLOUTS, [Reward(name="judge", function=judge)]).total.tolist() == [0.25, 0.5]


def test_asynchronous_functions_run_at_the_same_time():
    met = []

    async def meets(completions):
        met.append(asyncio.current_task())
        for _ in range(1000):  # until the other one is there, too
            if len(met) == 2:
                return [1.0, 1.0]
            await asyncio.sleep(0.01)
        raise TimeoutError

    rewards = [Reward(name="a", function=meets), Reward(name="b", function=meets)]
    assert score(ROLLOUTS, rewards).total.tolist() == [2.0, 2.0]


def test_an_asynchronous_function_runs_where_an_event_loop_runs_already():
    async def judge(completions):
        await asyncio.sleep(0)
        return [0.25, 0.5]

    async def notebook():
        return score(ROLLOUTS, [Reward(name="judge", function=judge)])

    assert asyncio.run(notebook()).total.tolist() == [0.25, 0.5]


def test_one_that_fails_leaves_no_other_unawaited():
    async def judge(completions):
        return [0.25, 0.5]

    async def breaks(completions):
        raise KeyError("gold")

    functions = [judge, breaks, judge]
    with pytest.raises(RewardError, match="the reward breaks raised KeyError"):
        score(ROLLOUTS, [Reward(name=f.__name__, function=f) for f in functions])


def fails(completions):
    if "c" in completions:
        raise KeyError("gold")
    return [1.0] * len(completions)


async def fails_later(completions):
    return fails(completions)


def leaves(completions):
    if "c" in completions:
        sys.exit(3)
    return [1.0] * len(completions)


def fails_midway(completions):
    for completion in completions:
        yield fails([completion])[0]


def forgets_one(completions):
    return [1.0 for text in completions if text != "c"]


def fails_and_changes_its_list(completions):
    judged = list(completions)
    completions.clear()
    return fails(judged)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (fails, "raised KeyError: 'gold' (test_runner.py, line "),
        (fails_later, "raised KeyError: 'gold'"),
        (fails_midway, "raised KeyError: 'gold'"),
        (leaves, "raised SystemExit: 3"),
        (forgets_one, "returned 0 values for 1 completion,"),
        (fails_and_changes_its_list, "raised KeyError: 'gold'"),
    ],
)
@pytest.mark.parametrize("num", [1, 2, 5, 8])
def test_a_function_that_fails_is_named_with_the_completion(function, told, num):
    rows = [rollout("ab", index=i) for i in range(num - 1)] + [rollout("c", index=7)]
    with pytest.raises(RewardError) as caught:
        score(rows, [Reward(name="judge", function=function)])
    message = str(caught.value)
    assert message.startswith(f"the reward judge {told}")
    assert f"first at completion {num - 1} (row 8 of the dataset, sample 0)" in message
    assert isinstance(caught.value.__cause__, KeyError | SystemExit | None)
    assert (caught.value.__cause__ is None) == (function is forgets_one)


def test_another_fault_on_the_way_to_the_first_is_told_with_its_own_place():
    def breaks(completions):
        if len(completions) > 2:
            raise KeyError("gold")
        return ["good" if text == "c" else 1.0 for text in completions]

    rows = [rollout(text, index=i) for i, text in enumerate("aaac")]
    with pytest.raises(RewardError, match=r"returned 'good' \(str\).*at completion 3 \(row 4 "):
        score(rows, [Reward(name="breaks", function=breaks)])


def test_a_failure_of_several_together_blames_none():
    def compares(completions):
        if len(completions) > 3:
            raise KeyError("gold")
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match="with each of the 8 completions alone it does not fail"):
        score([rollout("a")] * 8, [Reward(name="compares", function=compares)])


def test_a_function_that_fails_is_not_called_without_end():
    seen = []

    def breaks(completions):
        seen.append(len(completions))
        if "c" in completions:
            raise KeyError("gold")
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match="at completion 63"):
        score([rollout("a")] * 63 + [rollout("c")], [Reward(name="breaks", function=breaks)])
    assert sum(seen) <= 3 * 64
    assert len(seen) <= 1 + 2 * 6


def test_an_interruption_by_the_user_passes_through():
    def interrupted(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(ROLLOUTS, [Reward(name="judge", function=interrupted)])


@pytest.mark.parametrize("large", [1e308, -1e13, 10**400, math.inf])
def test_numbers_that_are_too_large_are_none_given_and_counted(large):
    scores = score(ROLLOUTS, [returning(large, 0.5)])
    np.testing.assert_array_equal(scores.total, [NAN, 0.5])
    np.testing.assert_array_equal(scores.parts["fixed"], [NAN, 0.5])
    assert (scores.num_missing, scores.num_nonfinite) == (1, 1)


def test_a_weight_that_makes_too_much_of_a_number_gives_no_total():
    scores = score(ROLLOUTS, [returning(1e12, 1.0, weight=10.0)])
    np.testing.assert_array_equal(scores.total, [NAN, 10.0])
    assert (scores.num_missing, scores.num_nonfinite) == (1, 0)


@pytest.mark.parametrize("values", [(1.0,), (1.0, "2"), (1.0, 2.0, 3.0)])
def test_what_is_not_one_number_a_completion_is_refused(values):
    with pytest.raises(RewardError, match="the reward fixed returned"):
        score(ROLLOUTS, [returning(*values)])


def test_what_a_function_prints_goes_to_standard_error(capsys):
    def talks(completions):
        print("scoring")  # noqa: T201
        return [0.0, 0.0]

    score(ROLLOUTS, [Reward(name="talks", function=talks)])
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "scoring\n")


def test_a_run_without_rewards_is_refused():
    with pytest.raises(ConfigError, match="no reward function"):
        score(ROLLOUTS, [])


def test_a_step_without_completions_has_no_rewards():
    scores = score([], [Reward(name="length", function=length)])
    assert scores.total.shape == scores.parts["length"].shape == (0,)
