"""klinic beside TRL: it reads everything, changes nothing, and says what is wrong."""

import io
import itertools
import json
from contextlib import closing

import numpy as np
import pytest
import torch
from rich.console import Console

from integrations.trainers import LONGEST, characters, make_trainer, save_start, weights

pytest.importorskip("trl")

import klinic
from klinic.checks import CHECKS
from klinic.doctor.cases import read_cases
from klinic.doctor.diagnosis import diagnose
from klinic.errors import ConfigError, RunStoppedError
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.integrations.trl.kl_term import SUPPORTED_LOSSES, token_weights
from klinic.maths import kl
from klinic.model.weights import digest
from klinic.report.live import Phase, RunWatcher

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*fan_in_fan_out.*"),
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func'"),
]
MANY = {"per_device_train_batch_size": 32, "learning_rate": 1e-4}  # tokens enough to judge by
SHAKY = {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return save_start(tmp_path_factory.mktemp("trl") / "start")


@pytest.fixture(scope="module")
def shaky_start(tmp_path_factory):
    return save_start(tmp_path_factory.mktemp("trl") / "shaky", **SHAKY)


def trained(trainer, run=None, **how):
    """Train, attached or not; return the weights, and what was said."""
    said = io.StringIO()
    if run is not None:
        klinic.attach(trainer, run, console=Console(file=said, width=400), **how)
    trainer.train()
    return weights(trainer), said.getvalue()


@pytest.mark.parametrize(
    ("beta", "peft", "dropout"),
    [
        (0.04, False, False),
        (0.0, True, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product([0.0, 0.04], [False, True], [False, True])
            if case not in ((0.04, False, False), (0.0, True, True))
        ),
    ],
)
def test_training_is_the_same_to_the_last_bit(start, shaky_start, tmp_path, beta, peft, dropout):
    def trainer(name):
        return make_trainer(
            shaky_start if dropout else start,
            tmp_path / name,
            beta=beta,
            peft=peft,
            lora_dropout=0.1 if dropout else 0.0,
            num_iterations=1 if dropout else 2,
        )

    alone = trainer("alone")
    expected, _ = trained(alone)
    beside = trainer("beside")  # seeds the random streams
    found, _ = trained(beside, tmp_path / "run", monitor_kl_every=1)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert any(not torch.equal(p, weights(trainer("new"))[name]) for name, p in found.items())
    for ours, theirs in zip(beside.state.log_history[:-1], alone.state.log_history, strict=False):
        same = theirs.keys() - {"step_time"}
        assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}


def test_detaching_leaves_no_trace(start, tmp_path):
    trainer = make_trainer(start, tmp_path / "out")
    lm, accelerator = trainer.model, trainer.accelerator
    before = [set(vars(owner)) for owner in (trainer, lm, accelerator)]
    callbacks = list(trainer.callback_handler.callbacks)
    expected = digest(lm.state_dict())
    with klinic.attach(trainer, tmp_path / "run"):
        assert "_compute_loss" in vars(trainer)
    assert [set(vars(owner)) for owner in (trainer, lm, accelerator)] == before
    assert trainer.callback_handler.callbacks == callbacks
    assert digest(lm.state_dict()) == expected
    klinic.attach(trainer, tmp_path / "again").detach()


@pytest.fixture(scope="module")
def healthy(taught, tmp_path_factory):
    """A run in which nothing is wrong: its folder, its trainer, and what was said."""
    folder = tmp_path_factory.mktemp("healthy")
    trainer = make_trainer(taught, folder / "out", max_steps=4, **MANY)
    _, said = trained(trainer, folder / "run")
    return folder / "run", trainer, said


def test_a_record_holds_what_was_trained_on(healthy):
    run, trainer, _ = healthy
    assert store.complete_steps(run) == [1, 2, 3, 4]
    for step in store.complete_steps(run):
        record = store.read_record(run, step)
        told = trainer.state.log_history[step - 1]
        assert np.bincount(record.group).tolist() == [4] * 16
        assert record.prompt_ids_match.all()
        assert record.facts["grad_norm"] == pytest.approx(told["grad_norm"])
        assert record.facts["loss"] == pytest.approx(told["loss"], abs=2e-5)
        assert float(record.reward.mean()) == pytest.approx(told["reward"])
        assert record.facts["learner_version"] == step - 1
        k3 = kl.k3(logp_p=record.logp_old, logp_q=record.logp_ref)
        assert float(k3[record.loss_mask].mean()) == pytest.approx(told["kl"], rel=0.05, abs=1e-6)
        for group in range(16):
            assert abs(float(record.advantage[record.group == group].sum())) < 1e-4


def test_the_sampler_reports_what_it_drew_from(healthy):
    run, _, _ = healthy
    for step in store.complete_steps(run):
        record = store.read_record(run, step)
        np.testing.assert_allclose(record.logp_sampler, record.logp, atol=2e-5)
        assert (record.finish_reason[np.diff(record.row_offsets) < LONGEST] == "stop").all()


def test_a_temperature_and_top_k_are_in_what_the_sampler_reports(start, tmp_path):
    settings = {"temperature": 0.7, "top_k": 5, "max_steps": 1, "warmup_steps": 0.5}
    trainer = make_trainer(start, tmp_path / "out", **settings)
    trained(trainer, tmp_path / "run")
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (facts["max_steps"], facts["warmup_steps"]) == (1, 1)
    record = store.read_record(tmp_path / "run", 1)
    lift = record.logp_sampler - record.logp
    assert (lift > -2e-5).all()
    assert lift.mean() > 0.01  # outcomes were left out, and the rest was lifted


def test_a_healthy_run_has_no_cause_and_its_reference_is_proven(healthy):
    run, _, said = healthy
    assert "The KL is exactly 0 on" in said
    assert "weights equal to those of the initial policy" in said
    assert "no cause was found" in said
    found = diagnose(read_cases(run), CHECKS)
    assert found.cause is None
    ruled_out = {h.check.name for h in found.hypotheses if str(h.status) == "ruled out"}
    assert {
        "stale-sampler",
        "wrong-reference",
        "kl-gradient-wrong",
        "loss-scaled-wrong",
    } <= ruled_out
    facts = json.loads((run / "run.json").read_text())
    assert facts["reference"]["digest"] == facts["policy"]["digest"]
    assert facts["estimator"] == "k3_ratio"


def test_the_kl_is_watched_at_beta_0(start, tmp_path):
    trainer = make_trainer(start, tmp_path / "out", beta=0.0, max_steps=4)
    _, said = trained(trainer, tmp_path / "run", monitor_kl_every=2)
    assert "MB stored" in said
    measured = {e["step"]: e for e in Journal(tmp_path / "run" / "metrics.jsonl").entries()}
    assert [step for step, line in measured.items() if "kl" in line] == [1, 3]
    assert measured[1]["kl_k3/max"] == pytest.approx(0.0, abs=1e-9)
    assert measured[3]["kl"] > 1e-4
    assert 0 <= measured[3]["kl_k1/share_above"] < 1
    assert measured[3]["time/klinic_monitor"] > 0
    shown = trainer.state.log_history[2]
    assert shown["klinic/kl_k3/mean"] == pytest.approx(measured[3]["kl"])
    assert "kl" not in shown


def test_an_adapter_that_adds_nothing_costs_no_copy(start, tmp_path):
    trainer = make_trainer(start, tmp_path / "out", beta=0.0, peft=True, max_steps=1)
    attached = klinic.attach(trainer, tmp_path / "run", monitor_kl_every=1)
    assert attached.reference.kind == "adapter_off"
    assert attached.reference.num_bytes == 0


def test_a_model_that_was_changed_in_memory_has_another_reference(taught, tmp_path):
    from transformers import AutoModelForCausalLM

    changed = AutoModelForCausalLM.from_pretrained(taught)
    with torch.no_grad():
        changed.model.layers[0].mlp.up_proj.weight.mul_(1.1)
    trainer = make_trainer(taught, tmp_path / "out", model=changed, max_steps=3, **MANY)
    _, said = trained(trainer, tmp_path / "run")
    assert "weights different from those of the initial policy" in said
    assert "Cause: wrong-reference" in said
    assert diagnose(read_cases(tmp_path / "run"), CHECKS).cause == "wrong-reference"


def test_dropout_is_named_and_can_stop_the_run(shaky_start, tmp_path):
    trainer = make_trainer(shaky_start, tmp_path / "out", max_steps=20)
    with pytest.raises(RunStoppedError, match="dropout-in-scoring"):
        trained(trainer, tmp_path / "run", doctor="stop")
    assert trainer.state.global_step < 4


def test_completions_that_are_used_twice_are_no_moved_reference(taught, tmp_path):
    trainer = make_trainer(taught, tmp_path / "out", max_steps=4, num_iterations=2, **MANY)
    trained(trainer, tmp_path / "run")
    records = [store.read_record(tmp_path / "run", step) for step in (1, 2, 3, 4)]
    assert [record.facts["weights_published"] is None for record in records] == [False, True] * 2
    assert diagnose(read_cases(tmp_path / "run"), CHECKS).cause is None


def test_dropout_of_a_fresh_adapter_is_not_taken_for_a_wrong_scale(start, tmp_path):
    trainer = make_trainer(start, tmp_path / "out", peft=True, lora_dropout=0.1, max_steps=3)
    trained(trainer, tmp_path / "run")
    asked = {e["probe"] for e in Journal(tmp_path / "run" / "probes.jsonl").entries()}
    assert "rescore" in asked
    assert "micro_batches" not in asked


@pytest.mark.parametrize("loss_type", SUPPORTED_LOSSES)
def test_token_weights_are_those_of_trls_loss(start, tmp_path, loss_type, monkeypatch):
    trainer = make_trainer(start, tmp_path / "out", loss_type=loss_type, max_steps=2, beta=1.0)
    compared = []
    real = trainer._compute_loss

    def watched(model, inputs):
        still = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}
        logp = trainer._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            inputs["completion_ids"].size(1),
        )[0]
        inside = inputs["completion_mask"].bool()
        k3 = kl.k3(logp_p=logp, logp_q=inputs["ref_per_token_logps"])
        ours = (token_weights(trainer, inputs, logp.dtype) * k3)[inside].sum()
        compared.append((ours.item(), real(model, still).item()))
        return real(model, inputs)

    monkeypatch.setattr(trainer, "_compute_loss", watched)
    trainer.train()
    for ours, theirs in compared[2:]:  # in the first step both are 0
        assert theirs != 0
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_what_cannot_be_attached_to_is_refused(start, tmp_path):
    with pytest.raises(ConfigError, match="received a dict"):
        klinic.attach({})
    trainer = make_trainer(start, tmp_path / "out")
    attached = klinic.attach(trainer, tmp_path / "run")
    with pytest.raises(ConfigError, match="already attached to this trainer"):
        klinic.attach(trainer, tmp_path / "other")
    attached.detach()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    with pytest.raises(ConfigError, match="not empty"):
        klinic.attach(trainer, tmp_path / "full")
    with pytest.raises(ConfigError, match="Use tell, stop or none"):
        klinic.attach(trainer, tmp_path / "new", doctor="warn")


class FailingError(Exception):
    """An error in a user's reward."""


@pytest.mark.parametrize("how", ["error", "stop", "detach"])
def test_a_training_that_ends_early_records_its_end(how, tmp_path, start):
    def fail(completions, **_):
        if how == "error":
            raise FailingError
        return characters(completions)

    trainer = make_trainer(start, tmp_path / "out", reward=fail, max_steps=2)
    attached = klinic.attach(trainer, tmp_path / "run", console=Console(file=io.StringIO()))
    if how == "stop":
        raise_stop = RunStoppedError("a cause")
        attached._run_log.report_diagnosis = lambda step: (_ for _ in ()).throw(raise_stop)
    if how == "detach":
        attached.begin_run()
        attached.detach()
    else:
        with pytest.raises(FailingError if how == "error" else RunStoppedError):
            trainer.train()
    with closing(RunWatcher(tmp_path / "run")) as follower:
        assert follower.take_snapshot().phase is Phase.ENDED
