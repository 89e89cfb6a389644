"""Heat map and gaps in a terminal: with colours or without, and nothing is obeyed."""

import io
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made import VOCABULARY, record, run_folder
from rich.console import Console
from rich.style import Style

from klinic.report.logp_gaps import compute_lanes
from klinic.report.reading import read_run_report
from klinic.report.terminal import completion_text, lane_text, print_run_report, select_step
from klinic.report.token_heatmap import heatmap_step
from klinic.runtime.terminal_text import escape_for_terminal

SENT = re.compile(r"\x1b\[[0-9;]*m")  # colours, and nothing else that begins with an escape


def printed(story, **how):
    for cached in (Style.parse, Style._add):  # rich keeps the colours of the terminal before
        cached.cache_clear()
    file = io.StringIO()
    print_run_report(story, Console(file=file, width=100, force_terminal=True, **how), None)
    return file.getvalue()


@pytest.mark.parametrize("colours", ["truecolor", "256", None])
def test_a_run_is_shown_in_as_many_colours_as_there_are(tmp_path, colours):
    text = printed(read_run_report(run_folder(tmp_path / "run", apart=0.5)), color_system=colours)
    assert "policy - sampler: mean gap 0.5 nats, steps 1 to 3" in text
    assert ("\x1b[" in text) == (colours is not None)
    assert ("48;2;" in text) == (colours == "truecolor")
    assert ("48;5;" in text) == (colours == "256")


def test_without_colours_the_tokens_that_matter_say_their_number():
    step = heatmap_step(record(lengths=(4,), moved=2.0), {})
    text = completion_text(step.completions[0], scale=2.0, colours=False).plain
    assert text.count("[+2.0]") == 4


@given(st.text(max_size=80))
def test_whatever_a_token_is_the_terminal_only_prints_it(text):
    shown = escape_for_terminal(text)
    assert all(c.isprintable() for c in shown)


def test_hostile_completions_send_no_escape(tmp_path):
    texts = dict.fromkeys(range(VOCABULARY), "\x1b]0;owned\x07\x1b[2J\u202e\x00[red]")
    text = printed(
        read_run_report(run_folder(tmp_path / "run", texts=texts)), color_system="truecolor"
    )
    assert "\x1b" not in SENT.sub("", text)
    assert "\u202e" not in text
    assert "\x00" not in text
    assert "[red]" in text  # and is no markup


def test_the_lane_of_a_sampler_that_is_the_policy_is_dark():
    made = [record(step, lengths=(8,) * 3, apart=0.0, moved=1.5) for step in range(1, 100)]
    update, sampler, reference = (lane_text(lane).plain for lane in compute_lanes(made))
    assert set(sampler.split("\n", 1)[1]) <= {" ", "\n"}
    assert "█" in reference
    assert max(map(len, reference.splitlines())) <= 80
    assert "mean gap 0 nats" in update


def test_a_step_that_is_not_shown_is_the_nearest():
    heat = [heatmap_step(record(step), {}) for step in (1, 10, 20)]
    assert select_step(heat, None).step == 20
    assert select_step(heat, 12).step == 10


def test_lanes_with_gaps_in_them_are_pooled_without_a_word():
    made = [record(step, lengths=(step, 2)) for step in range(1, 130)]
    assert np.isnan(compute_lanes(made)[0].sizes).any()
    assert lane_text(compute_lanes(made)[0]).plain
