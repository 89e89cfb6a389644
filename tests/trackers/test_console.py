"""What a person sees, in a terminal and in a file."""

import io
import re

import pytest
from rich.console import Console

from klinic.trackers.console import ConsoleTracker, WarmStartProgress, printable_cell, step_parts
from tiny_policies import batch_of, rollouts

STEP = {"loss": 0.1234, "grad_norm": 0.5678, "reward": 0.5, "kl": 0.12, "kl_penalty": 0.0012}

LINE = "Loss: 0.1234 | Grad norm: 0.5678 | Reward: 0.5000 | KL: 0.1200 | KL penalty: 0.0012"


def shown(act, *, terminal, width=120):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, color_system=None)
    act(console)
    return out.getvalue()


def two_steps(console):
    tracker = ConsoleTracker(console, max_steps=2)
    tracker.begin(step=0)
    tracker.log_metrics(0, {"eval/accuracy": 0.25})
    tracker.log_metrics(1, STEP)
    tracker.log_metrics(2, STEP)
    tracker.close()


def test_in_a_file_every_step_has_its_line():
    assert shown(two_steps, terminal=False).splitlines() == [
        "Step 0 | Held out | accuracy: 0.250",
        f"Step 1 | {LINE}",
        f"Step 2 | {LINE}",
    ]


def test_in_a_terminal_the_line_moves_and_says_what_is_left():
    text = shown(two_steps, terminal=True)
    assert "2/2" in text
    assert "KL penalty: 0.0012" in text


HELD_OUT = {f"eval/accuracy/skill number {n}": n / 8 for n in range(8)}


def last_frame(text):
    """Return the lines that a terminal shows at the end, without the frames before."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\n", text.rpartition("\x1b[1A")[2]).split("\n")


def evaluations(console, *, rewind=False):
    tracker = ConsoleTracker(console, max_steps=20)
    tracker.begin(step=0)
    for step in (0, 10, 20):
        tracker.log_metrics(step, {name: value + step for name, value in HELD_OUT.items()})
    if rewind:
        tracker.rewind(10)
    tracker.log_metrics(20 - 10 * rewind, STEP)
    tracker.close()


@pytest.mark.parametrize("width", [60, 100, 200])
def test_held_out_values_are_a_table_that_breaks_no_word(width):
    lines = last_frame(shown(evaluations, terminal=True, width=width))
    assert max(map(len, lines)) <= width
    rows = [line.split() for line in lines if line.startswith("skill number ")]
    assert [row[2:5] for row in rows] == [
        [str(n), f"{n / 8:.3f}", f"{n / 8 + 20:.3f}"] for n in range(8)
    ]
    assert all(row[5] == "▁▅█" for row in rows)
    (head,) = [line for line in lines if line.startswith("held out")]
    assert head.split() == ["held", "out", "step", "0", "step", "20"]


def test_a_run_that_goes_back_forgets_what_came_after():
    lines = last_frame(shown(lambda c: evaluations(c, rewind=True), terminal=True))
    assert any(line.split()[-2:] == ["step", "10"] for line in lines if "held out" in line)


def test_a_narrow_terminal_has_every_metric_on_two_lines():
    lines = last_frame(shown(two_steps, terminal=True, width=60))
    first = "Step 2 | Loss: 0.1234 | Grad norm: 0.5678 | Reward: 0.5000"
    stripped = [line.strip() for line in lines]
    assert stripped[stripped.index(first) + 1].startswith("KL: ")


def test_a_name_of_a_reward_is_shown_and_not_obeyed():
    def act(console):
        tracker = ConsoleTracker(console, max_steps=1)
        tracker.begin(step=0)
        tracker.log_metrics(0, {"eval/rewards/a\x1b[2J[b]": 0.5})
        tracker.close()

    assert "a\\x1b[2J[b]: 0.500" in shown(act, terminal=False)
    assert "a\\x1b[2J[b]" in shown(act, terminal=True)


def test_a_value_that_rounds_to_0_has_no_sign():
    assert step_parts(1, {"loss": -1e-9}) == ["Step 1", "Loss: 0.0000"]


def test_completions_stand_beside_their_rewards_and_cannot_command_the_terminal():
    made = rollouts(num_prompts=1, group_size=2)
    hostile = [type(r)(**{**_fields(r), "text": "\x1b[2J[bold]x" + "y" * 99}) for r in made]

    def act(console):
        ConsoleTracker(console, max_steps=1).log_completions(3, hostile, batch_of(made))

    text = shown(act, terminal=False)
    assert "\x1b" not in text
    assert "[bold]x" in text
    assert "yyy..." in text
    assert "advantage" in text


def _fields(rollout):
    return {name: getattr(rollout, name) for name in type(rollout).__slots__}


def test_a_warm_start_tells_every_tenth_of_its_way():
    def act(console):
        with WarmStartProgress(console) as progress:
            for step in range(1, 21):
                progress.show_progress(step, 20, 1.0 / step)

    lines = shown(act, terminal=False).splitlines()
    assert len(lines) == 10
    assert lines[-1] == "Warm start 20/20 | Loss: 0.0500"
    assert "20/20" in shown(act, terminal=True)


def test_printable_leaves_ordinary_text_alone():
    assert printable_cell("47+38= é") == "47+38= é"
