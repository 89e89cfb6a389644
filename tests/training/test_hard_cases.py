"""What a hostile reviewer broke once: each stays mended."""

import os
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import klinic
from klinic.errors import CheckpointError, ConfigError, DataError, PolicyError
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.learner.checkpoint import save_model
from klinic.learner.protocol import LossScales
from klinic.model.loading import load_policy, load_scorer
from klinic.recipe.loading import from_keywords
from klinic.recipe.sections import ModelSection
from klinic.tasks import catalogue
from klinic.trackers.console import WarmStartProgress
from klinic.training import checkpoint, compare, run, warm_start
from klinic.training.run_folder import lock_folder
from klinic.training.signals import stop_event
from tiny_policies import small_policy

pytestmark = pytest.mark.timeout(240)
ROWS = [{"prompt": f"{n}+{m}="} for n in range(4) for m in range(4)]
SMALL = {
    "max_steps": 3,
    "prompts_per_step": 2,
    "group_size": 2,
    "max_new_tokens": 3,
    "learning_rate": 1e-2,
    "threads": 1,
    "output.trackers": [],
    "output.doctor": "none",
    "loop.checkpoint_every": 1,
}


def digits(prompts, completions, **columns):
    return [sum(c.isdigit() for c in text) + len(text) / 10 for text in completions]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(as_before, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(folder, *, model="tiny", rows=ROWS, resume=False, reward=digits, **settings):
    return klinic.train(
        model=str(model),
        reward_funcs=reward,
        train_dataset=rows,
        resume=resume,
        **{**SMALL, "output.dir": folder, **settings},
    )


def logits(model):
    policy = load_policy(ModelSection(name=str(model)), temperature=1.0, seed=0)
    return policy.lm(input_ids=torch.tensor([[5, 6, 7, 8]])).logits.detach()


def moved_adapter(folder):
    """Return an adapter that is far from 0, on a base, in folders of their own."""
    save_model(folder / "base", small_policy())
    section = ModelSection(name=str(folder / "base"), lora_rank=2)
    policy = load_policy(section, temperature=1.0, seed=0)
    with torch.no_grad():
        for p in policy.lm.parameters():
            if p.requires_grad:
                p.add_(0.2)
    save_model(folder / "adapter", policy)
    return folder / "adapter"


def test_an_adapter_on_an_adapter_is_saved_on_what_it_was_trained_on(tmp_path):
    adapter = moved_adapter(tmp_path)
    still = train("run", model=adapter, lora_rank=2, learning_rate=0.0)
    torch.testing.assert_close(logits(still.model), logits(adapter), rtol=0, atol=1e-4)
    subject = compare.find_subject("run")
    assert subject.reference == "run/start"


def test_the_tiny_model_with_an_adapter_can_be_evaluated_wherever_the_run_is_moved(tmp_path):
    train("here", lora_rank=2, kl_coef=0.1, seed=3, learning_rate=0.0)
    shutil.move("here", "there")
    found = compare.evaluate_subject(
        compare.find_subject("there"), reference=None, prompts=None, task="arithmetic", num=3
    )
    assert found.kl is not None
    assert found.kl.per_token == pytest.approx(0, abs=1e-9)


def test_a_run_can_be_the_reference_of_another():
    for name, rate in (("one", 0.0), ("other", 1e-2)):
        train(name, learning_rate=rate)
    found = compare.evaluate_subject(
        compare.find_subject("one"), reference="other", prompts=None, task="arithmetic", num=3
    )
    assert found.reference == compare.find_subject("other").model
    assert found.kl.per_token > 0


def test_a_run_on_data_of_its_own_is_evaluated_by_its_rewards(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+2="}')
    (tmp_path / "rewards.py").write_text(
        "def one(prompts, completions, **_):\n    return [1.0 for _ in completions]\n"
    )
    own = {"rewards": ["rewards.py:one"], "data.path": "rows.jsonl"}
    klinic.train(model="tiny", **{**SMALL, "output.dir": "run", **own})
    found = compare.evaluate_subject(
        compare.find_subject("run", run_code=True), reference=None, prompts=None, task=None, num=9
    )
    assert (found.reward, found.reference_reward, found.accuracy) == (1.0, 1.0, {})
    assert found.kl.num_completions == 2


def test_a_task_is_measured_by_the_rewards_that_its_recipe_names(tmp_path):
    (tmp_path / "rewards.py").write_text(
        "def two(prompts, completions, **_):\n    return [2.0 for _ in completions]\n"
    )
    own = {"data.task": "arithmetic", "rewards": ["rewards.py:two", "binary"]}
    klinic.train(model="tiny", **{**SMALL, "output.dir": "run", **own})
    found = compare.evaluate_subject(
        compare.find_subject("run", run_code=True), reference=None, prompts=None, task=None, num=5
    )
    assert found.reward == pytest.approx(2.0 + found.accuracy["addition"])
    assert found.reference_reward == pytest.approx(2.0 + found.reference_accuracy["addition"])


def test_eval_refuses_a_reference_that_is_no_longer_the_same(tmp_path):
    train("run", kl_coef=0.1)
    other = small_policy()
    shutil.rmtree("run/start")
    save_model(Path("run/start"), other)
    with pytest.raises(CheckpointError, match="is not the reference of the run"):
        compare.evaluate_subject(
            compare.find_subject("run"), reference=None, prompts=None, task="arithmetic", num=3
        )


def test_a_signal_during_an_evaluation_is_not_lost_and_nothing_is_evaluated_twice(monkeypatch):
    evaluate = run.Run.evaluate

    def interrupted(self, step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, step)

    settings = {"loop.eval_every": 2, "max_steps": 5, "loop.checkpoint_every": 50}
    with monkeypatch.context() as patch:
        patch.setattr(run.Run, "evaluate", interrupted)
        stopped = train("run", **settings)
    assert (stopped.signal, stopped.step) == (signal.SIGTERM, 3)
    assert list(Journal(Path("run/events.jsonl")).entries())[-1] == stop_event(3, signal.SIGTERM)
    assert checkpoint.newest_valid(Path("run")).checkpoint.step == 3
    train("run", resume=True, **settings)
    whole = train("whole", **settings)
    assert _untimed("run") == _untimed("whole")
    assert whole.signal is None


def _untimed(folder):
    return [
        {name: value for name, value in entry.items() if not name.startswith("time/")}
        for entry in Journal(Path(folder) / "metrics.jsonl").entries()
    ]


def test_a_checkpoint_waits_for_the_records_before_it(monkeypatch):
    written = store.write_record
    slow = threading.Event()

    def late(folder, record, rank=0):
        slow.wait(0.05)
        written(folder, record, rank)

    monkeypatch.setattr(store, "write_record", late)
    seen = []
    write = checkpoint.write_checkpoint

    def looking(folder, step, **how):
        seen.append((step, store.complete_steps(folder)))
        return write(folder, step, **how)

    monkeypatch.setattr(checkpoint, "write_checkpoint", looking)
    train("run")
    assert seen == [(0, []), (1, [1]), (2, [1, 2]), (3, [1, 2, 3])]


def test_a_controller_can_raise_a_coefficient_that_starts_at_zero():
    settings = {"kl.coef": 0.0, "kl.controller": "dual_ascent", "kl.target": 1e-6, "max_steps": 4}
    train("run", **settings)
    coefs = [entry["kl_coef"] for entry in _untimed("run") if "kl_coef" in entry]
    assert coefs[0] == 0.0
    assert coefs[-1] > 0


def test_a_reference_with_other_tokens_is_refused(tmp_path):
    policy = small_policy()
    other = small_policy()
    other.tokenizer.add_tokens(["zz"])
    save_model(tmp_path / "other", other)
    with pytest.raises(ConfigError, match="would compare different tokens"):
        load_scorer(str(tmp_path / "other"), like=policy, seed=0)


def test_a_changed_base_under_an_adapter_is_not_resumed_on(tmp_path):
    save_model(tmp_path / "base", small_policy())
    train("run", model=tmp_path / "base", lora_rank=2)
    policy = small_policy()
    with torch.no_grad():
        next(policy.lm.parameters()).add_(0.5)
    save_model(tmp_path / "base", policy)
    with pytest.raises(CheckpointError, match="weights under the adapter"):
        train("run", model=tmp_path / "base", lora_rank=2, max_steps=4, resume=True)


def test_a_model_with_a_tensor_missing_is_not_filled_with_random_numbers(tmp_path):
    from safetensors.torch import load_file, save_file

    save_model(tmp_path, small_policy())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("transformer.h.1.mlp.c_fc.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"such as transformer\.h\.1\.mlp\.c_fc\.weight"):
        load_policy(ModelSection(name=str(tmp_path)), temperature=1.0, seed=0)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "gone"])
def test_broken_model_files_are_refused_in_a_sentence(tmp_path, damage):
    save_model(tmp_path, small_policy())
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    file.unlink()
    if damage != "gone":
        file.write_bytes(data[:-99] if damage == "truncated" else b"x" * 99)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_policy(ModelSection(name=str(tmp_path)), temperature=1.0, seed=0)


def warm(tmp_path, steps=2, **settings):
    how = {"warm_start.steps": steps, "warm_start.batch_size": 2, **settings}
    recipe = from_keywords(model="tiny", task="arithmetic", **how).recipe
    policy = load_policy(recipe.model, temperature=1.0, seed=0)
    told = []
    with WarmStartProgress(Console(quiet=True)):
        cached = warm_start.warm_start(
            policy, recipe, catalogue.find_task("arithmetic"), lambda *step: told.append(step)
        )
    return cached, len(told)


def test_a_damaged_warm_start_is_made_again(tmp_path):
    cached, made = warm(tmp_path)
    assert made == 2
    assert warm(tmp_path)[1] == 0
    file = cached.folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert warm(tmp_path)[1] == 2


def test_a_second_process_does_not_take_a_whole_result_away(tmp_path):
    cached, _ = warm(tmp_path)
    policy = load_policy(ModelSection(name="tiny"), temperature=1.0, seed=0)
    before = (cached.folder / "model.safetensors").stat().st_ino
    warm_start._store_in_cache(policy, cached)
    assert (cached.folder / "model.safetensors").stat().st_ino == before
    assert len(list(cached.folder.parent.iterdir())) == 1


def test_a_warm_start_that_ends_in_no_numbers_is_refused_and_not_kept(tmp_path):
    with pytest.raises(PolicyError, match=r"Lower warm_start\.learning_rate"):
        warm(tmp_path, steps=6, **{"warm_start.learning_rate": 1e30})
    assert list((tmp_path / "cache" / "warm_start").iterdir()) == []


def test_a_cache_that_cannot_be_made_is_said_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KLINIC_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="Set KLINIC_CACHE"):
        warm(tmp_path)


def test_two_processes_cannot_train_in_one_folder(tmp_path):
    train("run")
    with lock_folder(Path("run")), pytest.raises(ConfigError, match="is in use"):
        train("run", resume=True, max_steps=4)


def test_a_run_killed_before_its_first_word_does_not_block_its_folder(tmp_path):
    (tmp_path / "run").mkdir()
    with lock_folder(tmp_path / "run"):
        pass
    assert train("run").step == 3


def test_rows_that_do_not_fit_are_named_before_the_first_step():
    with pytest.raises(DataError, match=r"row 17: its prompt and completions .* takes 512"):
        train("run", rows=[*ROWS, {"prompt": "1" * 511}])


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be created"):
        train("file/run")


def test_rewards_that_add_up_to_infinity_are_missing():
    def huge(prompts, completions, **columns):
        return [1e308 if i else 0.0 for i, _ in enumerate(completions)]

    train("run", reward=[huge, huge])
    assert _untimed("run")[0]["reward/missing"] == 3


def test_a_token_without_a_reported_log_prob_is_weighed_by_the_learner_s_own(tmp_path):
    from tiny_policies import batch_of, drifted_reference, learner_of, rollouts

    policy = small_policy(double=True)
    record = batch_of(rollouts())
    learner = learner_of(policy, drifted_reference(policy))
    blank = record.logp_sampler.copy()
    blank[np.flatnonzero(record.loss_mask)[:2]] = np.nan
    scored = learner.score(replace(record, logp_sampler=blank), needs_reference=True)
    assert learner.prepare(scored, LossScales(kl_coef=0.1)).is_finite
