"""What may be concluded: intervals by hand, and no winner where seeds cannot tell."""

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from klinic.cli.ablation_view import print_results
from klinic.lab.ablation.comparison import ALL_MEASURES, num_tests, setting_rows, skill_measure_name
from klinic.lab.ablation.intervals import mean_interval, paired_difference
from klinic.lab.ablation.page import CONDITION, PageContent, write_page
from klinic.lab.ablation.results import AblationSummary
from klinic.lab.ablation.verdict import Verdict, pareto_front, recommend_setting, summary_lines


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


def verdict_on(found, baseline="kl.coef=0"):
    table = setting_rows(found, settings_of(found), baseline)
    return recommend_setting(table, skill_measure_name(found))


def test_means_have_the_interval_that_covers():
    found = results(b0=[(0.80, 0.99), (0.82, 1.0), (0.81, 0.98)])
    (row,) = setting_rows(found, settings_of(found), "kl.coef=0")
    assert row.means["accuracy"] == mean_interval([0.80, 0.82, 0.81])
    assert row.means["score"].low == pytest.approx(mean_interval([0.895, 0.91, 0.895]).low)


def test_what_all_seeds_share_is_no_noise_of_a_difference():
    """Seeds differ by 0.5 and the settings by 0.1 on each: unpaired it would drown."""
    found = paired_difference([0.1 + 0.1, 0.6 + 0.11, 0.3 + 0.09], [0.1, 0.6, 0.3])
    assert found.low > 0
    assert found.is_significant
    assert found.mean == pytest.approx(0.1)


def test_one_seed_has_no_interval_and_proves_nothing():
    assert math.isnan(mean_interval([0.5]).low)
    assert not paired_difference([0.9], [0.1]).is_significant
    found = results(b0=[(0.5, 1.0)], b1=[(0.9, 1.0)])
    assert verdict_on(found).best is None
    assert verdict_on(found).says.startswith("One seed tests nothing")


def test_a_clear_winner_is_recommended_over_the_baseline():
    found = results(
        b0=[(0.80, 0.70), (0.82, 0.71), (0.81, 0.69)],
        b0_01=[(0.80, 0.99), (0.82, 0.98), (0.81, 0.99)],
        b1=[(0.57, 1.00), (0.58, 1.00), (0.57, 1.00)],
    )
    verdict = verdict_on(found)
    assert verdict.best == "kl.coef=0.01"
    assert "higher than that of kl.coef=0 (3 seeds, corrected for 8 tests)" in verdict.says
    assert "Also higher, and not compared with it: kl.coef=1." in verdict.says


def test_noise_has_no_winner():
    found = results(
        b0=[(0.80, 1.0), (0.90, 1.0), (0.70, 1.0)],
        b0_01=[(0.85, 1.0), (0.75, 1.0), (0.84, 1.0)],
    )
    verdict = verdict_on(found)
    assert verdict.best is None
    assert verdict.says.startswith("Keep kl.coef=0: no other setting has a significantly higher")


def test_being_above_a_bad_setting_recommends_nothing():
    """0.1 has the highest mean and is above 1, but not above the baseline: keep the baseline."""
    found = results(
        b0=[(0.80, 1.0), (0.82, 1.0), (0.81, 1.0)],
        b0_1=[(0.81, 1.0), (0.81, 1.0), (0.82, 1.0)],
        b1=[(0.50, 1.0), (0.53, 1.0), (0.51, 1.0)],
    )
    verdict = verdict_on(found)
    assert verdict.best is None
    assert verdict.says.startswith("Keep kl.coef=0:")
    assert "Lower: kl.coef=1. Undecided at this power: kl.coef=0.1." in verdict.says


def test_a_difference_that_only_many_tests_produce_is_noise():
    """Alone its p-value is 0.021; among the tests of five settings it proves nothing."""
    pair = {"b0": [(0.80,), (0.82,), (0.81,)], "b1": [(0.88,), (0.95,), (0.94,)]}
    others = {f"b{n}": [(0.80,), (0.79 + n / 100,), (0.82,)] for n in (2, 3, 4, 5)}
    alone, among = (
        [{**r, "retention": None, "kl_token": None} for r in results(**settings)]
        for settings in (pair, pair | others)
    )
    assert verdict_on(alone).best == "kl.coef=1"
    table = setting_rows(among, settings_of(among), "kl.coef=0")
    assert num_tests(table) == 5
    difference = table[1].differences["accuracy"]  # t is 6.8, with two degrees of freedom
    assert difference.p_value == pytest.approx(1 - 6.8 / math.sqrt(6.8**2 + 2))
    assert difference.low > 0
    assert verdict_on(among).best is None


def test_without_anything_kept_accuracy_decides():
    found = results(b0=[(0.50,), (0.51,), (0.50,)], b1=[(0.70,)] * 3)
    verdict = verdict_on([{**r, "retention": None} for r in found])
    assert verdict.best == "kl.coef=1"
    assert "retention" not in verdict.says


def test_what_a_recipe_rewards_decides_where_it_names_its_rewards():
    """Chess rewards legal moves above all: the engine's own move is not what was learnt."""
    accuracy = results(b0=[(0.05,), (0.06,), (0.05,)], b1=[(0.01,), (0.02,), (0.03,)])
    rewards = [0.30, 0.31, 0.30, 0.55, 0.57, 0.56]
    found = [
        {**r, "retention": None, "reward": reward}
        for r, reward in zip(accuracy, rewards, strict=True)
    ]
    verdict = verdict_on(found)
    assert verdict.best == "kl.coef=1"
    assert "its reward is higher" in verdict.says
    table = setting_rows(found, settings_of(found), "kl.coef=0")
    assert table[1].differences["reward"].mean == pytest.approx(0.25667, abs=1e-4)
    assert "Acc=0.020+-0.025, Reward=0.560+-0.025, KL=" in summary_lines(table, verdict)[1]
    assert skill_measure_name(found) == "reward"


def test_the_closing_lines():
    found = results(b0=[(0.80, 0.7), (0.82, 0.7)], b0_01=[(0.90, 1.0), (0.93, 1.0)])
    table = setting_rows(found, settings_of(found), "kl.coef=0")
    lines = summary_lines(table, Verdict(best="kl.coef=0.01", says=""))
    assert lines == [
        "beta=0: Acc=0.810+-0.127, KL=0.0500, SFT_retention=0.700",
        "beta=0.01: Acc=0.915+-0.191, KL=0.0500, SFT_retention=1.000  <- best",
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


def test_the_page_names_its_conditions_and_its_tests(tmp_path):
    found = results(b0=[(0.8, 1.0), (0.9, 0.9)], b1=[(0.7, 1.0), (0.6, 0.8)])
    table = setting_rows(found, settings_of(found), "kl.coef=0")
    verdict = recommend_setting(table, "accuracy")
    content = PageContent(
        title="t", command="c", rows=table, verdict=verdict, failures=[], baseline="kl.coef=0"
    )
    text = write_page(tmp_path, content, []).read_text()
    assert CONDITION in text
    assert "the 4 tests of this page (Holm)" in text


def test_the_page_has_no_column_without_values(tmp_path):
    table = setting_rows(results(b0=[(0.8, 1.0)]), ["kl.coef=0"], "kl.coef=0")
    content = PageContent(
        title="t",
        command="c",
        rows=table,
        verdict=Verdict(best=None, says=""),
        failures=[],
        baseline="kl.coef=0",
    )
    heads = write_page(tmp_path, content, []).read_text().partition("</tr>")[0]
    assert ">accuracy</th>" in heads
    assert ">reward</th>" not in heads


@pytest.fixture
def summary():
    found = results(b0=[(0.80, 0.7), (0.82, 0.7)], b0_01=[(0.90, 1.0), (0.93, 1.0)])
    return AblationSummary(
        results=found,
        curves={},
        table=setting_rows(found, settings_of(found), "kl.coef=0"),
        learnt="accuracy",
        verdict=Verdict(best="kl.coef=0.01", says="Use kl.coef=0.01."),
        failures=[],
        baseline="kl.coef=0",
        question=ALL_MEASURES,
    )


def screen(summary, *, width, terminal):
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    print_results(Path("out"), summary, console)
    return console.file.getvalue()


@pytest.mark.parametrize(("width", "terminal"), [(60, True), (80, False)])
def test_lines_where_the_table_has_no_room(summary, width, terminal):
    text = screen(summary, width=width, terminal=terminal)
    assert "beta=0.01: Acc=0.915+-0.191, KL=0.0500," in text
    assert "to baseline" not in text
    assert "…" not in text


def test_a_table_is_not_repeated_as_lines(summary):
    text = screen(summary, width=100, terminal=True)
    assert "kl.coef=0.01 <- best" in text
    assert "Acc=" not in text
