"""The self-test of a device, on the CPU: what it writes, refuses and does not give away."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from klinic.cli.check import check
from klinic.errors import ConfigError
from klinic.learner.local import LocalLearner
from klinic.replay.check_report import CheckReport
from klinic.replay.self_test import (
    check_sampler_gap,
    describe_memory,
    record_with_signal,
    try_updates,
)
from klinic.replay.self_test_report import SelfTestFile
from tiny_policies import batch_of, drifted_reference, learner_of, rollouts, small_policy, weights

CPU = torch.device("cpu")


@pytest.fixture
def learner():
    policy = small_policy()
    return learner_of(policy, drifted_reference(policy))


def test_updates_are_equal_after_a_resume_and_the_weights_are_restored(learner, tmp_path):
    before = [p.detach().clone() for p in weights(learner.policy)]
    waits, resumed = try_updates(
        learner, batch_of(rollouts()), kl_coef=0.5, folder=tmp_path / "saved"
    )
    assert (waits.ok, waits.detail) == (True, "none: this is the CPU")
    assert resumed.ok, resumed.detail
    after = [p.detach() for p in weights(learner.policy)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_updates_that_change_nothing_do_not_pass(learner, tmp_path, monkeypatch):
    monkeypatch.setattr(LocalLearner, "commit", lambda *_, **__: {})
    *_, resumed = try_updates(learner, batch_of(rollouts()), kl_coef=0.5, folder=tmp_path / "saved")
    assert not resumed.ok
    assert "changed no weight" in resumed.detail


def test_a_batch_without_a_signal_gets_one():
    record = batch_of(rollouts())
    assert record_with_signal(record) is record
    silent = replace(record, advantage=np.zeros(record.num_rows))
    assert set(record_with_signal(silent).advantage) == {-1.0, 1.0}


def test_the_sampler_gap_has_a_limit_for_each_dtype():
    name = "sampling/sampling_logp_difference/mean"
    assert not check_sampler_gap({name: 0.05}, dtype="fp32").ok
    assert check_sampler_gap({name: 0.05}, dtype="bf16").ok
    assert not check_sampler_gap({name: float("nan")}, dtype="bf16").ok
    assert "not measured" in check_sampler_gap({}, dtype="fp32").detail


def test_measured_memory_is_shown_beside_the_prediction():
    assert describe_memory(None, 2**20).detail == "not measured on this device, 1.0 MB predicted"
    assert "too low" not in describe_memory(2**20, 2**20).detail
    assert "too low" in describe_memory(2**21, 2**20).detail


def test_the_file_has_versions_and_results_and_nothing_private(tmp_path):
    report, path = CheckReport(), tmp_path / "selftest.txt"
    with SelfTestFile(path, CPU, report):
        report.add_component("model and device", "/home/smith/secret-model, 3 parameters")
        report.add_component("device", "log-probs differ", ok=False)
        report.samples.append(("a private prompt", "its completion", 1.0))
    text = path.read_text()
    assert f"torch {torch.__version__}" in text
    assert "FAIL device: log-probs differ" in text
    assert "passed: False" in text
    for private in ("smith", "secret", "prompt", str(tmp_path)):
        assert private not in text


def raise_in_torch():
    torch.nn.Linear(2, 3)(torch.ones(1, 5))


def raise_with_a_path():
    torch.load("/home/smith/weights")


def raise_with_a_prompt():
    raise RuntimeError("a private prompt")


@pytest.mark.parametrize("work", [raise_in_torch, raise_with_a_path, raise_with_a_prompt])
def test_an_error_is_written_without_private_text(tmp_path, work):
    report, path = CheckReport(), tmp_path / "selftest.txt"
    report.add_component("sampling", "4 completions")
    with pytest.raises((RuntimeError, OSError)), SelfTestFile(path, CPU, report):
        work()
    text = path.read_text()
    assert "ok   sampling" in text
    assert "FAIL stopped by" in text
    assert ("shapes cannot be multiplied" in text) == (work is raise_in_torch)
    for private in ("smith", "prompt", str(tmp_path)):
        assert private not in text


def test_a_file_that_cannot_be_written_is_refused_before_the_check(tmp_path):
    with (
        pytest.raises(ConfigError, match="--output"),
        SelfTestFile(tmp_path / "none" / "x.txt", CPU, CheckReport()),
    ):
        pytest.fail("the check ran")


@pytest.mark.parametrize(
    ("device", "settings", "sentence"),
    [
        ("cuda", [], "torch .* finds no accelerator here"),
        ("gpu", [], "this is not a device"),
        ("cpu", ["learner.shards=2"], "one process"),
    ],
)
def test_a_device_that_cannot_be_tested_is_refused_in_one_sentence(
    tmp_path, device, settings, sentence
):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: tiny\ntask: arithmetic\n")
    output = tmp_path / "selftest.txt"
    with pytest.raises(ConfigError, match=sentence):
        check(recipe, settings, device=device, output=output)
    assert not output.exists()
