"""What may be concluded: intervals by hand, and no winner where seeds cannot tell."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klinic.lab.ablation.intervals import (
    Interval,
    bootstrap_interval,
    paired_difference,
    t_interval,
)
from klinic.lab.ablation.page import PageContent, write_page
from klinic.lab.ablation.verdict import (
    Verdict,
    pareto_front,
    recommend_setting,
    setting_rows,
    skill_measure_name,
    summary_lines,
)

VALUES = st.lists(st.floats(-10, 10), min_size=2, max_size=6)


def result(setting, seed, accuracy, retention=1.0, kl=0.05):
    return {
        "setting": setting,
        "seed": seed,
        "accuracy": accuracy,
        "retention": retention,
        "kl_token": kl,
    }


def results(**settings):
    """Return results by setting: lists of (accuracy, retention), one a seed."""
    return [
        result(f"kl.coef={name.removeprefix('b').replace('_', '.')}", seed, *pair)
        for name, pairs in settings.items()
        for seed, pair in enumerate(pairs, 1)
    ]


def settings_of(found):
    return list(dict.fromkeys(one["setting"] for one in found))


@given(VALUES)
def test_a_bootstrap_interval_lies_within_the_values_around_their_mean(values):
    found = bootstrap_interval(values)
    assert min(values) - 1e-9 <= found.low <= found.mean + 1e-9
    assert found.mean - 1e-9 <= found.high <= max(values) + 1e-9


def test_a_bootstrap_of_few_values_is_exact():
    values = [0.1, 0.4, 0.9]
    means = sorted(sum(draw) / 3 for draw in itertools.product(values, repeat=3))
    found = bootstrap_interval(values)
    position = 0.025 * (len(means) - 1)
    low = means[int(position)] + (position % 1) * (means[int(position) + 1] - means[int(position)])
    assert found.low == pytest.approx(low)


def test_students_interval_is_that_of_the_tables():
    found = t_interval([1.0, 2.0, 3.0, 4.0])  # mean 2.5, sd 1.291, t(3) 3.182
    assert found.low == pytest.approx(2.5 - 3.182 * 1.2909944 / 2, abs=1e-6)


def test_what_all_seeds_share_is_no_noise_of_a_difference():
    """Seeds differ by 0.5 and the settings by 0.1 on each: unpaired it would drown."""
    found = paired_difference([0.1 + 0.1, 0.6 + 0.11, 0.3 + 0.09], [0.1, 0.6, 0.3])
    assert found.excludes_zero
    assert found.mean == pytest.approx(0.1)


def test_one_seed_has_no_interval_and_proves_nothing():
    assert math.isnan(bootstrap_interval([0.5]).low)
    assert not paired_difference([0.9], [0.1]).excludes_zero


def test_a_clear_winner_is_recommended_with_whom_it_beats():
    found = results(
        b0=[(0.80, 0.70), (0.82, 0.71), (0.81, 0.69)],
        b0_01=[(0.80, 0.99), (0.82, 0.98), (0.81, 0.99)],
        b1=[(0.57, 1.00), (0.58, 1.00), (0.57, 1.00)],
    )
    verdict = recommend_setting(found, settings_of(found))
    assert verdict.best == "kl.coef=0.01"
    assert "above kl.coef=0, kl.coef=1" in verdict.says


def test_noise_has_no_winner():
    found = results(
        b0=[(0.80, 1.0), (0.90, 1.0), (0.70, 1.0)],
        b0_01=[(0.85, 1.0), (0.75, 1.0), (0.84, 1.0)],
    )
    verdict = recommend_setting(found, settings_of(found))
    assert verdict.best is None
    assert verdict.says.startswith("No significant difference: kl.coef=0.01 has")


def test_a_winner_that_beats_some_says_whom_it_is_not_told_apart_from():
    found = results(
        b0=[(0.80, 1.0), (0.82, 1.0), (0.81, 1.0)],
        b0_1=[(0.81, 1.0), (0.81, 1.0), (0.82, 1.0)],
        b1=[(0.50, 1.0), (0.52, 1.0), (0.51, 1.0)],
    )
    verdict = recommend_setting(found, settings_of(found))
    assert verdict.best == "kl.coef=0.1"
    assert "above kl.coef=1. Within noise of kl.coef=0." in verdict.says


def test_without_anything_kept_accuracy_decides():
    found = [{**r, "retention": None} for r in results(b0=[(0.5,)] * 2, b1=[(0.7,)] * 2)]
    found[0]["accuracy"] += 0.01
    verdict = recommend_setting(found, settings_of(found))
    assert verdict.best == "kl.coef=1"
    assert "retention" not in verdict.says


def test_what_a_recipe_rewards_decides_where_it_names_its_rewards():
    """Chess rewards legal moves above all: the engine's own move is not what was learnt."""
    accuracy = results(b0=[(0.01,), (0.02,)], b1=[(0.05,), (0.06,)])
    rewards = [0.55, 0.57, 0.30, 0.31]
    found = [
        {**r, "retention": None, "reward": reward}
        for r, reward in zip(accuracy, rewards, strict=True)
    ]
    verdict = recommend_setting(found, settings_of(found))
    assert verdict.best == "kl.coef=0"
    assert "highest reward" in verdict.says
    table = setting_rows(found, settings_of(found), "kl.coef=0")
    assert table[1].differences["reward"].mean == pytest.approx(-0.255)
    assert "Acc=0.015+-0.005, Reward=0.560+-0.009, KL=" in summary_lines(table, verdict)[0]
    assert skill_measure_name(found) == "reward"


def test_the_closing_lines():
    found = results(b0=[(0.80, 0.7), (0.82, 0.7)], b0_01=[(0.90, 1.0), (0.93, 1.0)])
    table = setting_rows(found, settings_of(found), "kl.coef=0")
    lines = summary_lines(table, Verdict(best="kl.coef=0.01", says=""))
    assert lines == [
        "beta=0: Acc=0.810+-0.009, KL=0.0500, SFT_retention=0.700",
        "beta=0.01: Acc=0.915+-0.014, KL=0.0500, SFT_retention=1.000  <- best",
    ]


def test_seeds_that_only_one_has_are_no_pair():
    found = results(b0=[(0.8, 1.0), (0.9, 1.0), (0.7, 1.0)], b1=[(0.81, 1.0), (0.91, 1.0)])
    table = setting_rows(found, settings_of(found), "kl.coef=0")
    assert table[1].differences["accuracy"].num == 2
    assert table[1].differences["accuracy"].mean == pytest.approx(0.01)


def test_the_pareto_front_is_what_nobody_beats_in_both():
    found = results(b0=[(0.9, 0.5)], b1=[(0.7, 0.9)], b2=[(0.6, 0.8)], b3=[(0.5, 1.0)])
    front = pareto_front(setting_rows(found, settings_of(found), "kl.coef=0"), "accuracy")
    assert [row.setting for row in front] == ["kl.coef=0", "kl.coef=1", "kl.coef=3"]


def test_a_page_quotes_and_does_not_obey(tmp_path):
    hostile = "<script>alert(1)</script>"
    table = setting_rows([result(hostile, 1, 0.5)], [hostile], hostile)
    content = PageContent(
        title=hostile,
        command=hostile,
        rows=table,
        verdict=Verdict(best=hostile, says=hostile),
        failures=[(hostile, hostile)],
        baseline=hostile,
    )
    path = write_page(tmp_path, content, [])
    assert "<script>" not in path.read_text()
    assert "&lt;script&gt;" in path.read_text()


def test_an_interval_that_touches_zero_excludes_nothing():
    assert not Interval(mean=0.1, low=0.0, high=0.2, num=3).excludes_zero
    assert Interval(mean=-0.1, low=-0.2, high=-0.05, num=3).excludes_zero
