"""A run that was killed and resumed is, bit for bit, the run that was not."""

import json
import os
import random
import signal
import subprocess
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from commands import klinic
from klinic.runtime.process_tree import descendant_pids
from klinic.training import checkpoint
from process_asserts import wait_until_gone
from training.killing import (
    RECIPE,
    Moment,
    command,
    differences,
    environment,
    num_steps,
    process_of,
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
    (folder / "recipe.yaml").write_text(RECIPE)
    done = forked(folder, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def forked(folder, cache, *more):
    """Train where torch is imported already: seconds less, and the same bits."""
    return klinic(*command(folder, *more)[1:], env=environment(cache), timeout=300)


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


@pytest.mark.slow  # test_killed_it_goes_on_by_itself is killed and resumed as well
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
    assert f"{file} is damaged" in " ".join(done.stdout.split())
    assert differences(whole, tmp_path / "run") == []


def started(folder, cache, *more, num):
    """Start a run that is supervised; return it as soon as it has made some steps."""
    process = subprocess.Popen(
        command(folder, *more),
        env=environment(cache, supervised=True),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # without a terminal, which may be that of the tests
    )
    while num_steps(folder / "run") < num:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    return process


def test_killed_it_goes_on_by_itself(tmp_path, cache, whole):
    """Nobody types --resume: the command comes to its end, and to the same bits."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    process, run = started(tmp_path, cache, num=5), tmp_path / "run"
    os.kill(process_of(run), signal.SIGKILL)
    printed, said = process.communicate()
    assert process.returncode == 0, said
    assert printed.count("model: name=tiny") == 1
    assert said.startswith("The run was killed by signal 9 (Killed) after step ")
    assert differences(whole, run) == []
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["event"] == "restarted"]
    assert event["signal"] == signal.SIGKILL
    assert event["says"] in said


@pytest.mark.slow
def test_killed_with_its_supervisor_it_leaves_nobody_and_can_be_resumed(tmp_path, cache):
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def one(completions, **_): return [float(len(c)) for c in completions]")
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("warm_start", "# warm_start"))
    apart = f"rewards=[{{function: '{rewards}:one', timeout: 60}}]"  # in a process of its own
    process = started(tmp_path, cache, apart, num=3)
    everybody = descendant_pids(process.pid)
    assert len(everybody) >= 3  # the run, its reward, and who watches that
    process.kill()
    wait_until_gone(everybody)
    process.communicate()
    run_whole(tmp_path, cache, "--resume", apart)
    assert num_steps(tmp_path / "run") == 12


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("to_all", [False, True])
def test_a_signal_saves_and_leaves_and_the_run_goes_on(tmp_path, cache, whole, number, to_all):
    """To the command alone, and to everybody in its process group."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    process, run = started(tmp_path, cache, num=3), tmp_path / "run"
    (os.killpg if to_all else os.kill)(process.pid, number)
    printed, _ = process.communicate()
    assert process.returncode == 128 + number
    assert "and saved.\n\nNext:\n  klinic train " in printed
    assert " --resume  continue after step " in printed
    assert checkpoint.newest_valid(run).checkpoint.step == num_steps(run)
    run_whole(tmp_path, cache, "--resume")
    assert differences(whole, run) == []


def shown_in_tensorboard(run, tag):
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [event.step for event in events.Scalars(tag)]


def test_another_recipe_or_other_rows_are_not_the_same_run(tmp_path, cache, whole):
    done = forked(whole.parent, cache, "--resume", "learner.learning_rate=1e-5")
    assert done.returncode == 2
    assert "learner.learning_rate is 1e-05 and was 0.0003." in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_with_a_run_is_not_written_over(cache, whole):
    done = forked(whole.parent, cache)
    assert done.returncode == 2
    assert "which is not empty" in done.stderr


def test_the_saved_model_is_one_that_transformers_loads(whole):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = checkpoint.newest_valid(whole).checkpoint.folder / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).encode("1+1=")
    assert sum(p.numel() for p in model.parameters()) > 500_000


def test_metrics_have_the_names_people_look_for(whole):
    entry = json.loads((whole / "metrics.jsonl").read_text().splitlines()[3])
    for name in (
        *("loss", "policy_loss", "grad_norm", "grad_norm_clipped", "learning_rate", "entropy"),
        *("reward", "reward_std", "reward/penalized", "rewards/graduated/mean"),
        *("kl", "kl_penalty", "kl_loss", "kl_coef", "logp", "logp_ref"),
        *("completions/clipped_ratio", "completions/parse_rate"),
        *("clip_ratio/region_mean", "frac_reward_zero_std"),
        *(f"kl_{kind}/{what}" for kind in ("k3", "k1", "exact") for what in SPREAD),
    ):
        assert name in entry, name
    assert entry["kl_penalty"] == pytest.approx(entry["kl_coef"] * entry["kl_loss"])
    assert entry["loss"] == pytest.approx(entry["policy_loss"] + entry["kl_penalty"])


SPREAD = ("mean", "min", "max", "p99", "top_share", "per_sequence")
