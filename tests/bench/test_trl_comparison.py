"""Both trainers of the race do the same with the same: prompts, settings, updates."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("trl")

import torch
from bench.trl_comparison import one
from bench.trl_comparison.entry import RESULTS, Entry, entries, is_done, results
from bench.trl_comparison.prompts import Watch, rows_by_step
from bench.trl_comparison.settings import GROUP, MAX_GRAD_NORM
from bench.trl_comparison.table import interval, page, paired
from bench.trl_comparison.trainers import trl_trainer, with_klinic
from safetensors.torch import load_file

from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import METRICS
from klinic.learner.checkpoint import save_model
from klinic.model.loading import load_policy
from klinic.recipe.sections import ModelSection
from klinic.tasks.arithmetic.task import TASK

ROOT = Path(__file__).parents[2]
ROWS = TASK.train_rows("addition")

pytestmark = [
    pytest.mark.timeout(300),  # a trainer of TRL and a process of its own take their time
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func'"),
]


def characters(completions, **_):
    """Something to learn for a model that knows nothing, and gradients that need clipping."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


def entry_of(trainer, *, coef=14.0, steps=3):  # as strong as the rewards
    return Entry(trainer=trainer, seed=1, coef=coef, steps=steps)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("race") / "start"
    save_model(folder, load_policy(ModelSection(name="tiny"), temperature=1.0, seed=0))
    return folder


def replayed(run):
    """Return a sampler for TRL that says what klinic's said."""
    steps = iter(store.complete_steps(run))

    def rollout(prompts, trainer):
        record = store.read_record(run, next(steps))
        ids = [row.tolist() for row in np.split(record.token_ids, record.row_offsets[1:-1])]
        prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None}

    return rollout


def update_of(weights, start):
    before = load_file(start / "model.safetensors")
    return torch.cat([(weights[name] - before[name]).flatten() for name in sorted(before)])


def test_on_the_same_completions_both_make_the_same_updates(start):
    entry, output = entry_of("klinic"), start.parent / "klinic"
    by_step = rows_by_step(ROWS, seed=entry.seed, steps=entry.steps)
    model = with_klinic(entry, Watch(by_step, characters), start=start, rows=ROWS, output=output)
    trainer = trl_trainer(
        entry_of("trl"),
        Watch(by_step, characters),
        start=start,
        by_step=by_step,
        output=start.parent / "trl",
        rollout_func=replayed(output),
    )
    trainer.train()
    ours = [line for line in Journal(output / METRICS).entries() if "reward" in line]
    theirs = trainer.state.log_history[: entry.steps]
    for name in ("reward", "kl", "grad_norm", "learning_rate", "completions/mean_length"):
        expected = pytest.approx([line[name] for line in theirs], rel=1e-3, abs=1e-6)
        assert [line[name] for line in ours] == expected, name
    assert max(line["grad_norm"] for line in ours) > MAX_GRAD_NORM  # so clipping was seen
    our_update = update_of(load_file(model / "model.safetensors"), start)
    difference = update_of(trainer.model.state_dict(), start) - our_update
    # 5e-5 is usual; 8e-4 where one of them clips to norm 2, 0.5 where one has no KL
    assert difference.norm() < 3e-4 * our_update.norm()


@pytest.mark.slow
def test_an_interrupted_race_goes_on_with_the_same_prompts(start, tmp_path):
    (tmp_path / "start").symlink_to(start)
    one.prepare(tmp_path, num_sums=20)
    first = entry_of("klinic", coef=0.04, steps=2)
    Journal(tmp_path / RESULTS).append(one.run(first, tmp_path))
    race = ["--seeds=1", "--coefs=0.04", "--steps=2", "--num-sums=20"]
    command = [sys.executable, "-m", "bench.trl_comparison", *race, f"--out={tmp_path}"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    done = results(tmp_path)
    assert [result["trainer"] for result in done] == ["klinic", "trl"]
    assert first.name not in printed
    assert done[0]["prompts"] == done[1]["prompts"]
    assert [len(result["rewards"]) for result in done] == [2, 2]
    assert page(done) in printed
    assert "| 2 | 0.04 | 1 |" in printed


def test_other_prompts_are_refused():
    by_step = rows_by_step(ROWS, seed=1, steps=2)
    asked = [row["prompt"] for row in by_step[0] for _ in range(GROUP)]
    watch = Watch(by_step, characters)
    watch.reward(prompts=asked, completions=["1"] * len(asked))
    with pytest.raises(AssertionError, match="step 2: the trainer asks for other prompts"):
        watch.reward(prompts=asked, completions=["1"] * len(asked))
    another = Watch(rows_by_step(ROWS, seed=2, steps=2), characters)
    with pytest.raises(AssertionError, match="step 1"):
        another.reward(prompts=asked, completions=["1"] * len(asked))


def result(trainer, seed, gain, **changes):
    return {
        "trainer": trainer,
        "seed": seed,
        "coef": 0.0,
        "steps": 10,
        "gain": gain,
        "retention": None,  # as of a start that knows nothing
        "kl_per_token": 0.1,
        "rewards": [0.25, 0.75],
        "before": {"addition": 0.5},
        "num_sums": 20,
        "prompts": f"p{seed}",
        "seconds": 5.0,
        "cpu_seconds": 4.0,
        "versions": {"trl": "1"},
        **changes,
    }


def test_the_table_compares_pairs_and_no_others():
    gains = {"klinic": (0.1, 0.4, 0.6, 0.9), "trl": (0.2, 0.2, 0.2)}
    done = [result(t, seed, gain) for t in gains for seed, gain in enumerate(gains[t])]
    row = page(done).splitlines()[2]
    assert row.startswith("| 10 | 0 | 3 | +0.3667 | +0.2000 | +0.1667 (-0.4585 to +0.7918) |")
    assert "0.25, 0.25; 0.75, 0.75" in row
    assert page(done[:1]) == "No pair of runs is done yet."
    with pytest.raises(AssertionError, match="prompts differ"):
        paired([result("klinic", 1, 0.1), result("trl", 1, 0.1, prompts="others")])


def test_the_interval_is_that_of_student():
    assert interval([0.1, 0.2, 0.3]) == "+0.2000 (-0.0484 to +0.4484)"
    assert interval([0.1]) == "+0.1000"


def test_the_trainers_take_turns_and_what_is_done_is_known():
    race = list(entries(seeds=2, coefs=[0.0, 0.04], steps=10))
    assert [entry.trainer for entry in race] == ["klinic", "trl"] * 4
    done = [result("klinic", 1, 0.1), result("trl", 2, 0.1)]
    names = [entry.name for entry in race if is_done(entry, done)]
    assert names == ["klinic-seed1-coef0-steps10", "trl-seed2-coef0-steps10"]
