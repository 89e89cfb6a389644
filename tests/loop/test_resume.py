"""A run that was killed and resumed is, bit for bit, the run that was not."""

import json
import random
import signal
import subprocess

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from klinic.loop import checkpoint
from loop.killing import (
    Moment,
    command,
    differences,
    environment,
    num_steps,
    run_killed,
    run_whole,
)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    folder = tmp_path_factory.mktemp("whole")
    run_whole(folder, cache)
    return folder / "run"


def moments(num, seed):
    """Return moments all over a run; every third is in the middle of a save."""
    stream = random.Random(seed)  # noqa: S311 - moments, not secrets
    for number in range(num):
        if number % 3 == 2:
            yield Moment(step=stream.randrange(1, 11), delay=stream.random() * 0.01, saving=True)
        else:
            yield Moment(step=stream.randrange(0, 11), delay=stream.random() * 0.2)


def kill_and_resume(tmp_path, cache, whole, when):
    doing = run_killed(tmp_path, cache, when)
    run_whole(tmp_path, cache, "--resume")
    assert differences(whole, tmp_path / "run") == []
    for tag in ("train/kl_penalty", "train/loss", "train/reward"):
        assert shown_in_tensorboard(tmp_path / "run", tag) == list(range(1, 13))
    return doing


@pytest.mark.parametrize("when", list(moments(3, seed=0))[2:], ids=str)
def test_killed_and_resumed(tmp_path, cache, whole, when):
    kill_and_resume(tmp_path, cache, whole, when)


@pytest.mark.slow
@pytest.mark.parametrize("when", list(moments(20, seed=1)), ids=str)
def test_killed_and_resumed_at_many_moments(tmp_path, cache, whole, when):
    print(kill_and_resume(tmp_path, cache, whole, when))  # noqa: T201 - for the log


@pytest.mark.slow
def test_a_broken_checkpoint_is_named_and_the_one_before_is_used(tmp_path, cache, whole):
    run_killed(tmp_path, cache, Moment(step=9))
    newest = max((tmp_path / "run" / "checkpoints").glob("step=??????"))
    file = newest / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    done = run_whole(tmp_path, cache, "--resume")
    assert f"{file} is not what was written" in " ".join(done.stdout.split())
    assert differences(whole, tmp_path / "run") == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_leaves_and_the_run_goes_on(tmp_path, cache, whole, number):
    (tmp_path / "recipe.yaml").write_text((whole.parent / "recipe.yaml").read_text())
    process = subprocess.Popen(
        command(tmp_path), env=environment(cache), stdout=subprocess.PIPE, text=True
    )
    run = tmp_path / "run"
    while num_steps(run) < 3:
        assert process.poll() is None
    process.send_signal(number)
    printed, _ = process.communicate()
    assert process.returncode == 128 + number
    assert "and saved. Go on with --resume." in printed
    assert checkpoint.newest_good(run).checkpoint.step == num_steps(run)
    run_whole(tmp_path, cache, "--resume")
    assert differences(whole, run) == []


def shown_in_tensorboard(run, tag):
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [event.step for event in events.Scalars(tag)]


def test_another_recipe_or_other_rows_are_not_the_same_run(tmp_path, cache, whole):
    done = subprocess.run(
        [*command(whole.parent), "--resume", "learner.learning_rate=1e-5"],
        env=environment(cache),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "learner.learning_rate is 1e-05 and was 0.0003." in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_with_a_run_is_not_written_over(cache, whole):
    done = subprocess.run(
        command(whole.parent), env=environment(cache), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "which is not empty" in done.stderr


def test_the_saved_model_is_one_that_transformers_loads(whole):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = checkpoint.newest_good(whole).checkpoint.folder / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).encode("1+1=")
    assert sum(p.numel() for p in model.parameters()) > 500_000


def test_metrics_have_the_names_people_look_for(whole):
    entry = json.loads((whole / "metrics.jsonl").read_text().splitlines()[3])
    for name in (
        *("loss", "policy_loss", "grad_norm", "grad_norm_clipped", "learning_rate", "entropy"),
        *("reward", "reward_std", "reward/penalized", "rewards/graduated/mean"),
        *("kl", "kl_penalty", "kl_coef", "logp", "logp_ref", "completions/clipped_ratio"),
        *("completions/parse_rate", "clip_ratio/region_mean", "frac_reward_zero_std"),
        *(f"kl_{kind}/{what}" for kind in ("k3", "k1", "exact") for what in SPREAD),
    ):
        assert name in entry, name
    assert entry["kl_penalty"] == pytest.approx(entry["kl_coef"] * entry["kl"])
    assert entry["loss"] == pytest.approx(entry["policy_loss"] + entry["kl_penalty"])


SPREAD = ("mean", "min", "max", "p99", "top_share", "per_sequence")
