"""JSON lines under the names of ten trainers, and what is wrong with some."""

import json

import pytest
from foreign_logs import healthy, write_all, write_lines, write_newer

from klinic.errors import EvidenceError
from klinic.evidence.readers import names
from klinic.evidence.readers.find import read_log
from klinic.evidence.readers.recognise import recognise_trainer

LOGS = {
    "trl_lines": "TRL",
    "klinic": "klinic",
    "verl": "verl",
    "openrlhf": "OpenRLHF",
    "prime_rl": "prime-rl",
    "tinker": "tinker",
    "nemo_rl": "NeMo-RL",
    "slime": "slime",
    "skyrl": "SkyRL",
    "open_instruct": "open-instruct",
}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    return write_all(folder, steps=30) | write_newer(folder, steps=30)


@pytest.mark.parametrize("name", LOGS)
def test_the_trainer_is_known_by_its_names(logs, name):
    log = read_log(logs[name])
    assert log.trainer.name == LOGS[name]
    assert log.steps == tuple(range(1, 31))
    wanted = [entry["reward"] for entry in healthy(30)]
    assert list(log.column("reward")) == pytest.approx(wanted)
    assert log.has_metric("entropy") or name == "openrlhf"


def test_signed_kls_are_not_taken_for_k3(logs):
    for name in ("openrlhf", "tinker", "slime"):
        log = read_log(logs[name])
        assert log.has_metric("kl_k1/mean")
        assert not log.has_metric("kl")


def test_every_trainers_names_lead_to_names_that_are_explained():
    for trainer in (*names.TRAINERS, names.ROLLOUTS):
        for klinic_name in trainer.names.values():
            assert klinic_name.partition("/")[0] in names.__doc__, (trainer.name, klinic_name)


@pytest.mark.parametrize(
    "name",
    ["step", "global_step", "train/global_step", "training/global_step", "_step", "iteration"],
)
def test_a_step_has_several_names(tmp_path, name):
    path = write_lines(tmp_path / "log.jsonl", [{name: 7, "reward": 1.0, "kl": 0.0}])
    assert read_log(path).steps == (7,)


def test_the_steps_of_training_come_before_the_calls_of_a_tracker(tmp_path):
    line = {"_step": 900, "train/global_step": 3, "train/reward": 1.0}
    assert read_log(write_lines(tmp_path / "log.jsonl", [line])).steps == (3,)


def test_several_lines_of_a_step_are_one(tmp_path):
    lines = [{"step": 1, "optim/lr": 1.0}, {"step": 1, "loss/mean": 2.0, "optim/grad_norm": 3.0}]
    log = read_log(write_lines(tmp_path / "log.jsonl", lines))
    assert (log.column("learning_rate"), log.column("loss")) == ((1.0,), (2.0,))


def test_lines_without_steps_are_counted_and_it_is_known(tmp_path):
    log = read_log(write_lines(tmp_path / "log.jsonl", [{"reward": 1.0}, {"reward": 2.0}]))
    assert (log.steps, log.steps_are_counted) == ((1, 2), True)


def test_what_is_no_number_is_counted(tmp_path):
    lines = [
        {"step": 1, "reward": [1]},
        {"step": 2, "reward": "0.5"},
        {"step": 3, "reward": True},
        {"step": "four", "reward": 1.0},
    ]
    log = read_log(write_lines(tmp_path / "log.jsonl", lines))
    assert log.column("reward") == (None, 0.5, None)
    assert log.num_skipped == 3


def test_a_torn_last_line_is_left_out(tmp_path):
    path = write_lines(tmp_path / "log.jsonl", [{"step": 1, "reward": 1.0}])
    path.write_bytes(path.read_bytes() + b'{"step": 2, "rew')
    assert read_log(path).steps == (1,)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "has no entries"),
        (b"hello\n", "line 1: is not a JSON object"),
        (b'{"step": 1, "reward": 1}\nhello\n{}\n', "line 2: is not a JSON object"),
        (b"[" * 100_000 + b"\n", "is not JSON .lists or objects inside each other too often"),
        ('{"step": 1, "reward": 1}\n'.encode("utf-16"), "line 1: is not a JSON object"),
        (b'{"step": 1}\n', "no metric that klinic knows"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_line(tmp_path, data, said):
    path = tmp_path / "log.jsonl"
    path.write_bytes(data)
    with pytest.raises(EvidenceError, match=said):
        read_log(path)


def test_evaluations_between_are_no_training(tmp_path):
    lines = [{"step": 1, "loss": 0.0, "kl": 0.1}, {"step": 1, "eval_loss": 1.0, "eval_kl": 9.0}]
    assert read_log(write_lines(tmp_path / "log.jsonl", lines)).column("kl") == (0.1,)
    summary = {"step": 1, "train_runtime": 5.0, "loss": 77.0}
    path = tmp_path / "log.jsonl"
    path.write_text(path.read_text() + json.dumps(summary) + "\n")
    assert read_log(path).column("loss") == (0.0,)


@pytest.mark.parametrize("name", ["nemo_rl", "slime", "skyrl", "open_instruct"])
def test_every_metric_that_matters_is_read(logs, name):
    log = read_log(logs[name])
    assert log.has_metric("kl") or log.has_metric("kl_k1/mean")
    assert any(log.has_metric(f"sampler/{kind}") for kind in ("gap", "kl", "mult_prob_error"))


@pytest.mark.parametrize(
    "found",
    [
        ["loss", "grad_norm", "reward", "kl", "entropy"],
        ["loss", "kl_penalty", "grad_norm", "reward"],  # klinic and NeMo-RL have it
        ["loss", "kl_loss", "grad_norm"],  # verl and slime have it
        ["reward", "reward_std", "frac_reward_zero_std"],  # TRL and klinic have them
        ["my/loss", "my/reward", "epoch"],
        ["truncated", "my/reward"],  # one name may be chance
    ],
)
def test_a_trainer_is_not_guessed(found):
    trainer = recognise_trainer(found)
    assert not trainer.recognised


@pytest.mark.parametrize(
    ("found", "trainer"),
    [
        (["train/pg_loss", "train/ois", "rollout/raw_reward", "train/train_rollout_kl"], "slime"),
        (["train/pg_loss", "train/ois", "train/ess_ratio", "rollout/raw_reward"], "miles"),
        (["loss", "kl", "completions/mean_length", "epoch", "num_tokens"], "TRL"),
        (["loss", "kl", "completions/mean_length", "epoch", "train_speed(s/it)"], "ms-swift"),
        (["loss", "kl", "completions/mean_length", "epoch", "completion_length"], "Unsloth"),
        (["loss", "kl", "epoch", "num_tokens", "completion_length"], "TRL"),
        (["ppo_actor/update/actor_loss/avg", "ppo_actor/task_reward/avg"], "AReaL"),
    ],
)
def test_forks_are_told_from_their_base(found, trainer):
    assert recognise_trainer(found).name == trainer


def test_every_trainer_cites_its_source():
    assert all(trainer.source for trainer in names.TRAINERS if trainer is not names.KLINIC)
    bases = {trainer.name for trainer in names.TRAINERS if not trainer.fork_of}
    for fork in (trainer for trainer in names.TRAINERS if trainer.fork_of):
        assert fork.fork_of in bases
        assert set(fork.fork_marks) <= fork.all_names | {"ess_ratio", "completions/mean_length"}


@pytest.mark.parametrize(
    ("line", "klinic_name", "trainer"),
    [
        ({"train/ess_ratio": 1.0, "train/pg_loss": 0.0, "train/ois": 1.0}, "sampler/kl", "miles"),
        ({"num_tokens": 1, "epoch": 1, "train_speed(s/it)": 1.0}, "entropy", "ms-swift"),
        ({"ppo_actor/task_reward/avg": 0.5, "rollout/reward": 0.5}, "entropy", "AReaL"),
    ],
)
def test_names_of_a_fork_are_read(tmp_path, line, klinic_name, trainer):
    own = {"miles": "train/train_rollout_kl", "ms-swift": "entropy/mean"}
    name = own.get(trainer, "ppo_actor/update/entropy/avg")
    log = read_log(write_lines(tmp_path / "log.jsonl", [{"step": 1, **line, name: 0.25}]))
    assert (log.trainer.name, log.column(klinic_name)) == (trainer, (0.25,))


def test_names_of_all_are_read_where_no_trainer_is_recognised(tmp_path):
    line = {"step": 1, "kl_loss": 15.0, "train_rollout_logprob_abs_diff": 0.4, "mine": 1.0}
    log = read_log(write_lines(tmp_path / "log.jsonl", [line]))
    assert log.to_json()["trainer"] is None
    assert (log.column("kl"), log.column("sampler/gap")) == ((15.0,), (0.4,))
    assert log.unknown == ("mine",)


@pytest.mark.parametrize(
    ("name", "key"), [("nemo_rl", "train/kl_penalty"), ("open_instruct", "objective/kl2_avg")]
)
def test_a_kl_that_is_always_0_is_none_where_the_trainer_writes_it_so(logs, tmp_path, name, key):
    lines = [{**json.loads(line), key: 0.0} for line in logs[name].read_text().splitlines()]
    log = read_log(write_lines(tmp_path / "log.jsonl", lines))
    assert not log.has_metric("kl")
    assert "kl" not in log.written_as


def test_steps_of_training_come_before_the_episodes_of_open_instruct(logs):
    assert read_log(logs["open_instruct"]).steps == tuple(range(1, 31))
