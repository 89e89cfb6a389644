"""What a person sees, in a terminal and in a file."""

import io

from rich.console import Console

from klinic.trackers.console import ConsoleTracker, WarmStartProgress, printable_cell
from tiny_policies import batch_of, rollouts

STEP = {"loss": 0.1234, "grad_norm": 0.5678, "reward": 0.5, "kl": 0.12, "kl_penalty": 0.0012}

LINE = "Loss: 0.1234 | Grad norm: 0.5678 | Reward: 0.5000 | KL: 0.1200 | KL penalty: 0.0012"


def shown(act, *, terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, color_system=None)
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
