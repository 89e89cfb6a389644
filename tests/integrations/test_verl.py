"""klinic in verl by one line: the mapping of a batch and the hooks, without verl itself."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from integrations.verl_batches import (
    ADVANTAGES,
    METRICS,
    PROMPTS,
    RESPONSES,
    SAMPLER,
    SCORES,
    Tokenizer,
    batch_meta,
    configuration,
    fields,
)
from klinic import Recorder
from klinic.errors import ConfigError, RunStoppedError
from klinic.evidence import store
from klinic.evidence.record import EmittedBy
from klinic.evidence.run_facts import read_run_facts
from klinic.integrations.verl import KlinicCallback
from klinic.integrations.verl.batch import find_emitters, read_batch, step_arguments
from klinic.integrations.verl.settings import VerlConfig, recorder_settings


@pytest.fixture(autouse=True)
def no_model_files(monkeypatch):
    monkeypatch.setattr("klinic.integrations.verl.callback.read_eos_ids", lambda tokenizer: [3])


def arguments(config=None, metrics=METRICS, processes=1, meta=None, **changes):
    meta = meta or batch_meta()
    batch = read_batch(fields(**changes), meta.keys, meta.tags, processes)
    return step_arguments(batch, metrics, VerlConfig(config or configuration()), 3)


def recorded(tmp_path, **changes):
    """Return the record of a step, through the Recorder itself."""
    settings = recorder_settings(VerlConfig(configuration()), Tokenizer())
    with Recorder(tmp_path / "run", doctor="none", **settings) as recorder:
        recorder.record_step(**arguments(**changes))
    return store.read_record(tmp_path / "run", 3)


def test_every_field_of_verl_is_a_column_of_the_record(tmp_path):
    record = recorded(tmp_path)
    assert record.token_ids.tolist() == [number for ids in RESPONSES for number in ids]
    assert record.prompt_ids.tolist() == [number for ids in PROMPTS for number in ids]
    flat = np.concatenate(SAMPLER).astype(np.float32)
    np.testing.assert_array_equal(record.logp_sampler, flat)
    np.testing.assert_array_equal(record.logp_old, flat - 0.125)
    np.testing.assert_array_equal(record.logp_ref, flat - 0.25)
    assert (record.entropy == 0.5).all()
    np.testing.assert_allclose(record.advantage, ADVANTAGES, rtol=1e-6)
    assert record.reward.tolist() == SCORES
    assert record.group.tolist() == [0, 0, 1, 1]
    assert set(record.weight_version.tolist()) == {2}
    assert record.finish_reason.tolist() == ["stop", "stop", "length", "stop"]
    assert (record.emitted_by == EmittedBy.POLICY).all()
    assert record.facts["learner_version"] == 2
    assert record.facts["grad_norm"] == 1.5
    assert record.facts["learning_rate"] == 1e-6
    assert record.facts["kl_logged"] == 0.25
    assert record.facts["loss"] == pytest.approx(0.5 + 0.01 * 0.25)


def test_half_precision_tensors_are_read(tmp_path):
    torch = pytest.importorskip("torch")
    rows = [torch.tensor(row, dtype=torch.bfloat16, requires_grad=True) for row in SAMPLER]
    record = recorded(tmp_path, old_log_probs=rows)
    np.testing.assert_array_equal(record.logp_old, np.concatenate(SAMPLER).astype(np.float32))


def test_the_settings_are_those_of_the_configuration(tmp_path):
    settings = recorder_settings(
        VerlConfig(configuration()), Tokenizer(), eos_ids=[1, 3], max_steps=50
    )
    with Recorder(tmp_path / "run", doctor="none", **settings):
        pass
    facts = read_run_facts(tmp_path / "run")
    assert facts["trainer"] == "verl"
    assert facts["sampling"] == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "max_new_tokens": 3,
    }
    assert facts["loss"] == {
        "name": "dapo",
        "aggregation": "token_mean",
        "clip_low": 0.2,
        "clip_high": 0.28,
    }
    assert facts["eos_ids"] == [1, 3]
    assert facts["policy"]["dtype"] == facts["sampler"]["dtype"] == "bf16"
    assert facts["sampler"]["max_version_lag"] == 0
    assert (facts["estimator"], facts["advantage"], facts["group_size"]) == ("k3", "group_std", 2)
    assert (facts["max_steps"], facts["warmup_steps"], facts["logprob_mode"]) == (
        50,
        5,
        "processed",
    )


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"actor_rollout_ref__actor__kl_loss_type": "k3+"}, "kl_estimator", "k3_plus"),
        ({"actor_rollout_ref__actor__kl_loss_type": "mse"}, "kl_estimator", "k2"),
        ({"actor_rollout_ref__actor__use_kl_loss": False}, "kl_estimator", None),
        ({"algorithm__use_kl_in_reward": True}, "kl_estimator", None),
        ({"algorithm__norm_adv_by_std_in_grpo": False}, "advantage", "group_mean"),
        ({"algorithm__adv_estimator": "rloo"}, "advantage", "leave_one_out"),
        ({"algorithm__adv_estimator": "gae"}, "advantage", None),
        ({"algorithm__rollout_correction": {"rollout_rs": "seq_sum_k1"}}, "advantage", None),
        ({"actor_rollout_ref__actor__policy_loss": {"loss_mode": "own"}}, "loss", None),
        ({"actor_rollout_ref__actor__clip_ratio_high": None}, "clip_high", 0.2),
        (
            {"actor_rollout_ref__actor__fsdp_config": {"mixed_precision": {"param_dtype": "fp32"}}},
            "dtype",
            "fp32",
        ),
        ({"actor_rollout_ref__actor__strategy": "megatron"}, "dtype", None),
        ({"trainer__v1__trainer_mode": "separate_async"}, "max_version_lag", 8),
        ({"actor_rollout_ref__rollout__multi_turn": {"enable": True}}, "eos_ids", [1]),
        (
            {
                "actor_rollout_ref__rollout__multi_turn": {"enable": True},
                "actor_rollout_ref__rollout__calculate_log_probs": False,
            },
            "eos_ids",
            None,
        ),
    ],
)
def test_a_setting_that_differs_is_recorded_or_left_out(changes, name, value):
    assert recorder_settings(VerlConfig(configuration(**changes)), Tokenizer())[name] == value


def test_rows_that_fill_the_batch_are_left_out_and_ranks_are_those_of_the_whole_batch():
    tags = [*batch_meta().tags]
    tags[1] = {"is_padding": True}
    result = arguments(meta=batch_meta(tags=tags), processes=2)
    assert result["process"].tolist() == [0, 1, 1]
    assert [row.tolist() for row in result["completion_ids"]] == [RESPONSES[n] for n in (0, 2, 3)]
    assert result["weight_version"] == [2, 2, 2]


def test_advantages_of_samples_with_several_rows_are_not_compared():
    assert arguments()["advantage"] is not None
    keys = ["a_0_0", "a_0_1", "b_0_0", "b_1_0"]
    assert arguments(meta=batch_meta(keys=keys))["advantage"] is None


def test_a_kl_in_the_rewards_is_part_of_them():
    config = configuration(
        algorithm__use_kl_in_reward=True, actor_rollout_ref__actor__use_kl_loss=False
    )
    taxed = [row - 0.5 for row in fields()["rm_scores"]]
    metrics = {"actor/reward_kl_penalty": 0.125, "actor/reward_kl_penalty_coeff": 0.002}
    result = arguments(config, metrics, token_level_rewards=taxed)
    assert result["reward"].tolist() == [row.sum() for row in taxed]
    assert (result["kl_coef"], result["kl_logged"]) == (0.002, 0.125)


def test_old_log_probs_that_verl_copies_from_the_sampler_are_not_the_learners():
    config = configuration(algorithm__rollout_correction={"bypass_mode": True})
    assert arguments(config)["logp_old"] is None


def test_a_loss_that_is_averaged_over_several_updates_is_not_recorded():
    assert arguments(configuration(data__train_batch_size=4))["loss"] is None
    assert arguments()["eval_accuracy"] == 0.375


def emitters(num_turns, mask, config=None):
    sampler = [np.array([-0.5, 0.0, -0.5], np.float32)] * 4
    rows = {"rollout_log_probs": sampler, "old_log_probs": [row - 0.1 for row in sampler]}
    rows |= {"response_mask": [np.array(mask)] * 4, "num_turns": [num_turns] * 4}
    batch = read_batch(fields(**rows), batch_meta().keys, batch_meta().tags)
    return find_emitters(batch, VerlConfig(config or configuration()))[0].tolist()


def test_a_token_without_a_log_prob_between_turns_is_the_environments():
    assert emitters(4, [1, 0, 1]) == [0, 1, 0]
    assert emitters(4, [1, 1, 1]) == [0, 1, 0]  # trained on although no policy emitted it
    assert emitters(2, [1, 1, 1]) == [0, 0, 0]  # a sampler's missing log-prob
    assert emitters(2, [1, 0, 1]) == [0, 1, 0]
    greedy = configuration(actor_rollout_ref__rollout__top_k=1)
    assert emitters(4, [1, 1, 1], greedy) == [0, 0, 0]  # the only candidate


class FakeTrainer:
    """The methods and attributes of verl's PPOTrainer that klinic uses."""

    tokenizer, total_training_steps, parameter_sync_step = Tokenizer(), 4, 1

    def __init__(self, config):
        self.checkpoint_callback = KlinicCallback(config=config)
        self.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 0, 1, 1]})
        self.logged = []

    def fit(self, steps):
        for self.global_steps in steps:
            metrics = dict(METRICS)
            self._compute_metrics(batch_meta(self.global_steps - 1), metrics, {}, 1, 0)
            self.logged.append(metrics)

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch):
        metrics["own"] = 1.0


@pytest.fixture
def trainer_class(monkeypatch, tmp_path):
    """Return a fresh trainer class in modules of verl's names."""
    monkeypatch.chdir(tmp_path)
    methods = {name: vars(FakeTrainer)[name] for name in ("fit", "_compute_metrics")}
    fresh = type("PPOTrainer", (FakeTrainer,), methods)
    names = ("verl", "verl.trainer", "verl.trainer.ppo", "verl.trainer.ppo.v1")
    for name in (*names, "verl.trainer.ppo.v1.trainer_base", "transfer_queue"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["verl.trainer.ppo.v1.trainer_base"].PPOTrainer = fresh
    queue = sys.modules["transfer_queue"]
    queue.kv_batch_get = lambda keys, partition_id, select_fields: fields()
    return fresh


def test_one_line_records_every_step_and_ends_the_run(trainer_class, tmp_path, capsys):
    trainer = trainer_class(configuration())
    trainer.fit([1, 2, 3])
    run = tmp_path / "runs" / "verl"
    assert [store.read_record(run, step).step for step in (1, 2, 3)] == [1, 2, 3]
    assert store.read_record(run, 2).process.tolist() == [0, 0, 1, 1]
    assert read_run_facts(run)["eos_ids"] == [1, 3]
    for metrics in trainer.logged:
        assert metrics.pop("timing_s/klinic") > 0
        assert metrics == {**METRICS, "own": 1.0}
    assert "3 steps examined: no cause was found" in capsys.readouterr().out


def test_a_second_trainer_records_once_into_the_next_folder(trainer_class, tmp_path):
    for _ in range(2):
        trainer_class(configuration()).fit([1])
    assert store.read_record(tmp_path / "runs" / "verl-2", 1).step == 1
    trainer_class({**configuration(), "klinic": {"folder": "mine"}}).fit([7, 9])
    assert store.read_record(tmp_path / "mine", 9).facts["learner_version"] == 8


def test_a_failure_of_klinic_is_printed_and_training_continues(trainer_class, capsys):
    def fail(**_):
        raise RuntimeError("queue is gone")

    sys.modules["transfer_queue"].kv_batch_get = fail
    trainer = trainer_class(configuration())
    trainer.fit([1, 2])
    assert len(trainer.logged) == 2
    text = capsys.readouterr().out
    assert "step 1 was not recorded: RuntimeError: queue is gone Training continues." in text
    assert "No step was recorded, so nothing was examined." in text
    assert "no cause was found" not in text


def test_the_doctor_stops_the_run_only_if_the_user_chose_it(trainer_class, monkeypatch):
    def stop(self, **_):
        raise RunStoppedError("a certain cause")

    monkeypatch.setattr(Recorder, "record_step", stop)
    trainer = trainer_class({**configuration(), "klinic": {"doctor": "stop"}})
    with pytest.raises(RunStoppedError, match="certain"):
        trainer.fit([1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"doctor": "loud"}, "klinic.doctor is 'loud'. Use one of tell, stop, none."),
        ({"dir": "x"}, r"klinic.dir is no option of klinic in verl. Use \+klinic.folder=DIR"),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_the_training(trainer_class, options, message):
    with pytest.raises(ConfigError, match=message):
        trainer_class({**configuration(), "klinic": options})


def test_a_verl_without_the_hooks_is_reported_by_name(trainer_class, capsys):
    base = sys.modules["verl.trainer.ppo.v1.trainer_base"]
    base.PPOTrainer = type("PPOTrainer", (), {"fit": lambda self: None})
    KlinicCallback(configuration())
    assert "no method PPOTrainer._compute_metrics: nothing will be recorded" in (
        capsys.readouterr().out
    )
    base.PPOTrainer = type(
        "PPOTrainer", (), {"fit": lambda self: None, "_compute_metrics": lambda self, batch: None}
    )
    KlinicCallback(configuration())
    assert "no parameter metrics of PPOTrainer._compute_metrics" in capsys.readouterr().out
