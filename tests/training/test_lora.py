"""Runs with adapters: where they start, what they are tied to, and how they go on."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file

import klinic
from klinic.errors import CheckpointError, ConfigError
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import read_run_facts
from klinic.learner.checkpoint import save_model
from klinic.learner.protocol import LossScales
from klinic.model.adapters import has_adapter
from klinic.model.reference import copy_as_reference, reference_at_start
from klinic.training import compare
from model.foreign import move, policy_of, write_adapter, write_base
from tiny_policies import batch_of, gradient, learner_of, rollouts, small_policy

pytestmark = pytest.mark.timeout(240)
ROWS = [{"prompt": f"{n}+{m}="} for n in range(4) for m in range(4)]
SMALL = {
    "max_steps": 4,
    "prompts_per_step": 2,
    "group_size": 2,
    "max_new_tokens": 3,
    "learning_rate": 1e-2,
    "threads": 1,
    "output.trackers": [],
    "output.doctor": "none",
    "loop.checkpoint_every": 2,
    "kl_coef": 0.1,
}


def digits(prompts, completions, **columns):
    return [sum(c.isdigit() for c in text) + len(text) / 10 for text in completions]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(as_before, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def adapter(tmp_path):
    """An adapter that was trained before, with a dropout of its own."""
    return write_adapter(tmp_path / "sft", write_base(tmp_path / "base"), lora_dropout=0.1)


def train(folder, model, *, resume=False, **settings):
    return klinic.train(
        model=str(model),
        reward_funcs=digits,
        train_dataset=ROWS,
        resume=resume,
        **{**SMALL, "output.dir": folder, **settings},
    )


def saved(folder, step):
    return load_file(Path(folder) / f"checkpoints/step={step:06d}/model/adapter_model.safetensors")


def untimed(folder):
    return [
        {name: value for name, value in entry.items() if not name.startswith("time/")}
        for entry in Journal(Path(folder) / "metrics.jsonl").entries()
    ]


def test_an_adapter_is_trained_further_and_tied_to_where_it_was(adapter):
    result = train("run", adapter)
    facts = read_run_facts(result.folder)["reference"]
    assert (facts["kind"], facts["source"]) == ("adapter_frozen", str(adapter))
    first, last = (store.read_record(result.folder, step) for step in (1, 4))
    assert np.array_equal(first.logp, first.logp_ref)
    assert np.array_equal(first.logp, first.logp_old)
    assert np.abs(first.logp - first.logp_sampler)[first.loss_mask].max() <= 1e-4
    assert not np.array_equal(last.logp, last.logp_ref)
    before, after = load_file(adapter / "adapter_model.safetensors"), saved("run", 4)
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert sorted(path.name for path in result.model.iterdir() if path.is_dir()) == []
    theirs = AutoPeftModelForCausalLM.from_pretrained(result.model)
    ids = torch.arange(5, 15)[None]
    ours = policy_of(result.model).lm(input_ids=ids).logits
    assert torch.equal(theirs(input_ids=ids).logits, ours)


def test_a_run_of_an_adapter_resumes_bit_for_bit(adapter):
    train("whole", adapter)
    train("parts", adapter, max_steps=2)
    train("parts", adapter, resume=True)
    whole, parts = saved("whole", 4), saved("parts", 4)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert untimed("whole") == untimed("parts")


@pytest.mark.parametrize(("what", "named"), [("sft", "reference"), ("base", "reference")])
def test_a_changed_adapter_or_base_is_not_resumed_on(adapter, tmp_path, what, named):
    train("run", adapter, max_steps=2)
    if what == "sft":
        shutil.rmtree(adapter)
        write_adapter(adapter, tmp_path / "base", by=0.2, lora_dropout=0.1)
    else:
        base = policy_of(tmp_path / "base")
        move(base)
        save_model(tmp_path / "base", base)
    with pytest.raises(CheckpointError, match=f"the digest of the {named} was"):
        train("run", adapter, resume=True)


def test_a_base_that_changed_under_an_adapter_without_kl_is_not_resumed_on(adapter, tmp_path):
    train("run", adapter, max_steps=2, kl=None, kl_coef=0.0)
    base = policy_of(tmp_path / "base")
    move(base)
    save_model(tmp_path / "base", base)
    with pytest.raises(CheckpointError, match="weights under the adapter"):
        train("run", adapter, resume=True, kl=None, kl_coef=0.0)


def test_a_run_of_an_adapter_is_evaluated_against_where_it_started(adapter, tmp_path):
    train("run", adapter, learning_rate=0.0)
    subject = compare.find_subject("run")
    assert subject.reference == str(adapter)

    def evaluate():
        how = {"reference": None, "prompts": None, "task": "arithmetic", "num": 3}
        return compare.evaluate_subject(subject, **how)

    assert evaluate().kl.max_token == 0.0
    shutil.rmtree(adapter)
    write_adapter(adapter, tmp_path / "base", by=0.2)
    with pytest.raises(CheckpointError, match="is not the reference of the run"):
        evaluate()


def test_an_adapter_can_be_the_reference_of_any_run(adapter, tmp_path):
    same = train("same", adapter, max_steps=1, **{"reference.path": str(adapter)})
    record = store.read_record(same.folder, 1)
    assert np.array_equal(record.logp, record.logp_ref)
    other = train("other", tmp_path / "base", max_steps=1, **{"reference.path": str(adapter)})
    record = store.read_record(other.folder, 1)
    assert np.abs(record.logp - record.logp_ref).max() > 0.01
    assert read_run_facts(other.folder)["reference"]["source"] == str(adapter)


def test_a_rank_merges_the_adapter_into_the_start_and_trains_a_fresh_one(adapter):
    result = train("run", adapter, lora_rank=3, max_steps=1)
    facts = read_run_facts(result.folder)["reference"]
    assert (facts["kind"], facts["source"]) == ("adapter_off", "run/start")
    assert not has_adapter(policy_of(Path("run/start")).lm)
    record = store.read_record(result.folder, 1)
    assert np.array_equal(record.logp, record.logp_ref)
    assert policy_of(result.model).lm.peft_config["default"].r == 3


def test_a_warm_start_of_an_adapter_is_refused(adapter):
    settings = {"task": "arithmetic", "warm_start.steps": 2}
    with pytest.raises(ConfigError, match="warm_start trains every weight"):
        klinic.train(model=str(adapter), **settings, **{**SMALL, "output.dir": "run"})


@pytest.mark.parametrize("estimator", ["unbiased", "exact"])
@pytest.mark.parametrize("tokens_at_a_time", [2, 1000])
def test_a_frozen_adapter_gives_the_gradient_that_a_copy_of_the_model_gives(
    estimator, tokens_at_a_time
):
    found = []
    for freeze in (reference_at_start, copy_as_reference):
        policy = small_policy(double=True, lora_rank=2)
        move(policy, 0.05)
        reference = freeze(policy.scorer, source="start")
        move(policy, 0.02)
        for scorer in (policy.scorer, reference.scorer):
            scorer.chunk_elements = tokens_at_a_time * policy.vocabulary_size
        learner = learner_of(policy, reference, estimator=estimator)
        scored = learner.score(batch_of(rollouts()), needs_reference=True)
        prepared = learner.prepare(scored, LossScales(kl_coef=0.5))
        found.append((reference.kind, prepared.record.logp_ref, gradient(policy)))
    (one, logp_ref, ours), (other, expected_ref, expected) = found
    assert (one, other) == ("adapter_frozen", "copy")
    np.testing.assert_array_equal(logp_ref, expected_ref)
    assert float(expected.norm()) > 1e-3
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("moved", [0.0, 0.05])
def test_gradient_checkpointing_does_not_change_an_adapter_s_gradient(moved):
    found, calls = [], [0, 0]
    for checkpointing in (False, True):
        policy = small_policy(lora_rank=2, gradient_checkpointing=checkpointing)

        def count(*_, which=checkpointing):
            calls[which] += 1

        policy.lm.get_decoder().h[0].attn.register_forward_pre_hook(count)
        move(policy, moved)
        learner = learner_of(policy, reference_at_start(policy.scorer, source="start"))
        scored = learner.score(batch_of(rollouts()), needs_reference=True)
        learner.prepare(scored, LossScales(kl_coef=0.5))
        found.append(gradient(policy))
    assert calls[1] == calls[0] + 1  # it is computed once more, so there is something to prove
    assert float(found[0].norm()) > 1e-3
    assert torch.equal(*found)
