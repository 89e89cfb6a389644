"""Whole runs in this process: what they start from, what they leave, and what must not matter."""

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import klinic
from klinic.errors import ConfigError
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import read_run_facts, read_tokens
from klinic.model.reference import Reference
from klinic.recipe.loading import from_keywords
from klinic.training.source import PythonInputs
from klinic.training.train import assemble_run, load_task_data, make_learner, train

pytestmark = pytest.mark.timeout(240)
ROWS = [{"prompt": f"{n}+{m}=", "answer": str(n + m)} for n in range(4) for m in range(4)]
SMALL = {
    "max_steps": 3,
    "prompts_per_step": 2,
    "group_size": 3,
    "max_new_tokens": 4,
    "learning_rate": 1e-3,
    "threads": 1,
    "output.trackers": [],
    "output.doctor": "none",
}


def digits(prompts, completions, answer, **columns):
    return [sum(c.isdigit() for c in text) / 4 for text in completions]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(as_before, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(name, **settings):
    settings = {**SMALL, "output.dir": name, **settings}
    return klinic.train(model="tiny", reward_funcs=digits, train_dataset=ROWS, **settings)


def final_weights(result):
    from safetensors.numpy import load_file

    return load_file(result.model / "model.safetensors")


def journal(result):
    return list(Journal(result.folder / "metrics.jsonl").entries())


def equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def test_coefficient_zero_gives_the_weights_of_no_kl_and_never_asks_a_reference(monkeypatch):
    asked = []
    original = Reference.hidden
    monkeypatch.setattr(
        Reference, "hidden", lambda self, layout: asked.append(1) or original(self, layout)
    )
    without = run("without")
    zero = run("zero", kl_coef=0.0)
    assert asked == []
    assert equal(final_weights(without), final_weights(zero))
    watched = run("watched", **{"kl_coef": 0.0, "kl.monitor_every": 2})
    assert len(asked) == 2
    assert equal(final_weights(without), final_weights(watched))
    tied = run("tied", kl_coef=1.0)
    assert len(asked) == 5
    assert not equal(final_weights(without), final_weights(tied))


def test_the_first_step_is_at_its_reference_and_at_its_sampler():
    for name, settings in {"copy": {}, "lora": {"lora_rank": 4}}.items():
        result = run(name, kl_coef=0.1, **settings)
        record = store.read_record(result.folder, 1)
        assert np.array_equal(record.logp, record.logp_old)
        assert np.array_equal(record.logp, record.logp_ref)
        trained = record.loss_mask
        assert np.abs(record.logp - record.logp_sampler)[trained].max() <= 1e-4
        later = store.read_record(result.folder, 3)
        assert not np.array_equal(later.logp, later.logp_ref)
        assert (later.weight_version == 2).all()
        assert later.facts["weights_published"] == later.facts["weights_loaded"]
        assert later.facts["weights_published"] != record.facts["weights_published"]


def test_a_run_leaves_what_a_reader_needs():
    result = run("out", kl_coef=0.1)
    facts = read_run_facts(result.folder)
    assert facts["reference"]["kind"] == "copy"
    assert len(facts["reference"]["digest"]) == 64
    assert facts["estimator"] == "unbiased"
    assert facts["sampling"]["max_new_tokens"] == 4
    assert (facts["max_steps"], facts["warmup_steps"]) == (3, 0)
    assert read_tokens(result.folder)[7] == "4"
    assert store.complete_steps(result.folder) == [1, 2, 3]
    entries = journal(result)
    assert [entry["step"] for entry in entries] == [1, 2, 3]
    assert (result.folder / "recipe.yaml").exists()


def test_a_warm_start_is_made_once_and_is_the_reference(tmp_path):
    settings = {"task": "arithmetic", "warm_start.steps": 3, "warm_start.batch_size": 4}
    settings |= {
        "kl_coef": 0.1,
        "loop.eval_prompts": 2,
        **SMALL,
    }
    first = klinic.train(model="tiny", **settings, **{"output.dir": "a"})
    (cached,) = (tmp_path / "cache" / "warm_start").iterdir()
    stamp = (cached / "model.safetensors").stat().st_mtime_ns
    second = klinic.train(model="tiny", seed=5, lora_rank=2, **settings, **{"output.dir": "b"})
    assert (cached / "model.safetensors").stat().st_mtime_ns == stamp
    for result, kind in ((first, "copy"), (second, "adapter_off")):
        facts = read_run_facts(result.folder)
        assert facts["reference"]["kind"] == kind
        assert Path(facts["reference"]["source"]) == result.folder / "start"
        record = store.read_record(result.folder, 1)
        assert np.array_equal(record.logp, record.logp_ref)
    other = {**settings, "warm_start.steps": 4}
    klinic.train(model="tiny", **other, **{"output.dir": "c"})
    assert len(list((tmp_path / "cache" / "warm_start").iterdir())) == 2
    assert set(first.before) >= {"eval/accuracy", "eval/accuracy/copying"}


def test_a_reference_from_another_folder_is_used_as_it_is(tmp_path):
    start = run("start")
    tied = run("tied", **{"kl_coef": 0.1, "reference.path": str(start.model)})
    record = store.read_record(tied.folder, 1)
    assert np.array_equal(record.logp, record.logp_old)
    assert not np.array_equal(record.logp, record.logp_ref)
    assert read_run_facts(tied.folder)["reference"]["source"] == str(start.model)


def test_a_second_run_of_a_name_gets_a_folder_of_its_own():
    settings = dict(SMALL)
    how = {"reward_funcs": digits, "train_dataset": ROWS, **settings}
    first = klinic.train(model="tiny", **how)
    second = klinic.train(model="tiny", **how)
    assert (first.folder, second.folder) == (Path("runs/tiny"), Path("runs/tiny-2"))


def test_a_metric_that_is_missing_from_a_reward_is_counted_not_hidden():
    def picky(prompts, completions, **columns):
        return [None if i % 3 == 0 else float(i) for i, _ in enumerate(completions)]

    settings = {**SMALL, "output.dir": "picky"}
    result = klinic.train(model="tiny", reward_funcs=[picky], train_dataset=ROWS, **settings)
    entry = journal(result)[0]
    assert entry["reward/missing"] == 2
    record = store.read_record(result.folder, 1)
    assert np.isnan(record.reward).sum() == 2
    assert (record.advantage[np.isnan(record.reward)] == 0).all()


@pytest.mark.parametrize("estimator", ["exact", "topk", "sequence", "k1_reward"])
def test_every_kind_of_estimator_trains(estimator):
    result = run(
        "any", **{"kl_coef": 0.1, "kl.estimator": estimator, "learner.updates_per_batch": 2}
    )
    entries = journal(result)
    assert entries[-1]["kl"] > 0
    assert all(entry["discarded"] == 0 for entry in entries)


def test_a_prompts_count_beyond_the_rows_is_refused():
    with pytest.raises(ConfigError, match="prompts_per_step is 17"):
        run("many", prompts_per_step=17)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own doings
def test_compiled_models_train_the_same():
    plain, compiled = (
        run("plain", kl_coef=0.1),
        run("compiled", kl_coef=0.1, **{"model.compile": True}),
    )
    a, b = final_weights(plain), final_weights(compiled)
    for name in a:
        np.testing.assert_allclose(a[name], b[name], atol=5e-3)


def test_assembling_needs_no_loop(tmp_path):
    loaded = from_keywords(model="tiny", task="arithmetic", kl_coef=0.1)
    source = load_task_data(loaded.recipe, PythonInputs())
    run = assemble_run(loaded.recipe, tmp_path, source, Console(quiet=True))
    assert make_learner(loaded.recipe, run.parts.policy, None).publish().version == 0
    assert callable(train)


def test_the_decays_of_adamw_are_those_of_the_recipe():
    usual, other = run("usual"), run("other", adam_beta1=0.5, adam_beta2=0.9)
    assert not equal(final_weights(usual), final_weights(other))
    same = run("same", adam_beta1=0.9, adam_beta2=0.999)
    assert equal(final_weights(usual), final_weights(same))
