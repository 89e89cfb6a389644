"""Statistics of a step, under TRL's names, with what was missing beside them."""

import math

import numpy as np
import pytest

from klinic.rewards.scores import StepRewards, reward_statistics

NAN = math.nan


def scores(total, parts, **counts):
    return StepRewards(
        total=np.array(total),
        parts={name: np.array(part) for name, part in parts.items()},
        num_missing=counts.get("num_missing", 0),
        num_nonfinite=counts.get("num_nonfinite", 0),
        lost=counts.get("lost", {}),
    )


def test_means_and_deviations_leave_out_what_was_not_given():
    found = reward_statistics(
        scores(
            [1.0, 3.0, NAN],
            {"a": [2.0, 4.0, NAN]},
            num_missing=1,
            num_nonfinite=2,
            lost={"timeouts": 3, "failed": 4},
        )
    )
    assert found == {
        "reward": 2.0,
        "reward_std": pytest.approx(math.sqrt(2)),
        "rewards/a/mean": 3.0,
        "rewards/a/std": pytest.approx(math.sqrt(2)),
        "reward/missing": 1.0,
        "reward/nonfinite": 2.0,
        "reward/timeouts": 3.0,
        "reward/crashed": 0.0,
        "reward/failed": 4.0,
    }
    assert {type(value) for value in found.values()} == {float}


@pytest.mark.parametrize("values", [[], [NAN, NAN]])
def test_of_nothing_there_is_no_mean(values):
    found = reward_statistics(scores(values, {"a": values}))
    assert math.isnan(found["reward"])
    assert math.isnan(found["rewards/a/std"])


def test_one_number_has_a_mean_and_no_deviation():
    found = reward_statistics(scores([0.5, NAN], {}))
    assert found["reward"] == 0.5
    assert math.isnan(found["reward_std"])


@pytest.mark.torch
def test_they_are_the_numbers_trl_would_log():
    torch = pytest.importorskip("torch")
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    part = np.array([0.0, 1.0, NAN, 0.25, 1.0])
    found = reward_statistics(scores(part, {"a": part}))
    assert found["rewards/a/mean"] == pytest.approx(torch.nanmean(torch.tensor(part)).item())
    assert found["reward_std"] == pytest.approx(nanstd(torch.tensor(part)).item())
