"""`klinic diagnose` of other trainers' logs, as a process."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "evidence" / "readers"))

from foreign_logs import (
    FIXTURES,
    healthy,
    trl_entries,
    write_events,
    write_lines,
    write_token_export,
    write_trainer_state,
    write_wandb,
)
from foreign_texts import CONSOLES, EXACT

from klinic.checks import CHECKS
from processor_speed import allowed_seconds

KLINIC = [sys.executable, "-P", "-m", "klinic.cli"]


def diagnose(path, *flags):
    return subprocess.run(
        [*KLINIC, "diagnose", str(path), *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_a_healthy_log_is_well_and_says_that_it_is_scalars(tmp_path):
    path = write_trainer_state(tmp_path / "trainer_state.json", trl_entries(healthy(60)))
    said = diagnose(path)
    assert said.returncode == 0, said.stderr
    assert "Scalars only" in said.stdout
    assert "No sign of trouble" in said.stdout
    assert 'klinic.attach(trainer, "runs/mine")' in said.stdout
    told = json.loads(diagnose(tmp_path, "--json").stdout)
    assert told["ok"] is True
    assert told["evidence"] == "scalars"
    assert told["read"]["trainer"] == "TRL"
    keys = {"cause", "confidence", "findings", "ruled_out", "missing", "fix", "first_step"}
    assert keys <= told.keys()


def test_a_kl_at_step_0_fails_with_what_it_could_be(tmp_path):
    entries = [{**entry, "kl": 15.0} for entry in trl_entries(healthy(60))]
    path = write_trainer_state(tmp_path / "trainer_state.json", entries)
    said = diagnose(path)
    assert said.returncode == 1
    assert (
        "Something is wrong: kl-at-step-0, first seen in step 1. Most likely cause: wrong-reference"
        in said.stdout
    )
    assert "Do this first:\n  1. wrong-reference: Pass the start model itself" in said.stdout
    assert "could be: wrong-reference, temperature-on-one-side" in said.stdout
    told = json.loads(diagnose(path, "--json").stdout)
    assert (told["ok"], told["cause"], told["first_step"]) == (False, None, 1)
    finding = next(f for f in told["findings"] if f["name"] == "kl-at-step-0")
    assert finding["verdict"] == "fail"
    assert "record.logp_ref" in finding["decided_by"]


def test_a_cause_that_is_left_alone_is_named_with_its_fix(tmp_path):
    entries = [{**e, "reward": None if e["step"] > 30 else 0.5} for e in trl_entries(healthy(60))]
    said = diagnose(write_lines(tmp_path / "log.jsonl", entries))
    assert said.returncode == 1
    assert "Cause: broken-reward, first seen in step 31" in said.stdout
    assert "1. Call each function of `reward_funcs` on one completion" in said.stdout


def test_beta_0_is_no_fault_and_is_explained(tmp_path):
    entries = trl_entries(healthy(60))
    for entry in entries:
        del entry["kl"]
    said = diagnose(write_lines(tmp_path / "log.jsonl", entries), "--all")
    assert said.returncode == 0
    assert "? kl-at-step-0: not logged: kl or kl_k1/mean (at beta 0 TRL has no" in said.stdout


NEMO_RL = {
    "train/loss": 0.1,
    "train/grad_norm": 0.3,
    "train/reward": 0.5,
    "train/kl_penalty": 15.0,
    "train/token_mult_prob_error": 3.0,
    "train/gen_kl_error": 0.4,
    "train/probs_ratio": 1.0,
}
SLIME = {
    "train/loss": 0.1,
    "train/pg_loss": 0.1,
    "train/pg_clipfrac": 0.0,
    "train/ppo_kl": 0.0,
    "train/grad_norm": 0.3,
    "train/kl_loss": 15.0,
    "train/train_rollout_logprob_abs_diff": 0.4,
}


@pytest.mark.parametrize("prefix", ["train/", ""])
@pytest.mark.parametrize(("name", "metrics"), [("NeMo-RL", NEMO_RL), ("slime", SLIME)])
def test_a_sick_log_of_another_trainer_is_not_called_well(tmp_path, name, metrics, prefix):
    metrics = {key.replace("train/", prefix, 1): value for key, value in metrics.items()}
    path = write_lines(tmp_path / "log.jsonl", [{"step": n, **metrics} for n in range(1, 61)])
    ended = diagnose(path)
    assert ended.returncode == 1
    assert f"JSON lines of {name}, 60 logged steps" in ended.stdout
    assert "✗ kl-at-step-0: the KL is 15 nats per token" in ended.stdout
    assert "✗ sampler-far-from-learner" in ended.stdout
    told = json.loads(diagnose(path, "--json").stdout)
    assert (told["verdict"], told["ok"], told["read"]["trainer"]) == ("likely", False, name)


def test_what_was_not_understood_follows_the_verdict(tmp_path):
    entries = [
        {"step": n, "my/kl": 15.0, "my/sampler_gap": 0.4, "reward": 0.5 + n / 100, "lr": 1e-6}
        for n in range(1, 61)
    ]
    path = write_lines(tmp_path / "log.jsonl", entries)
    ended = diagnose(path)
    verdict, first, second, third, fourth, *_ = ended.stdout.splitlines()
    assert verdict.startswith("No sign of trouble in the metrics read.")
    assert first == "KL and sampler gap were not found in this log; 2 of 4 metrics were read."
    assert second == "Read as: learning_rate = lr"
    assert third == (
        "Not read: my/kl, my/sampler_gap. If one is a missing metric: --metric kl=NAME "
        "--metric sampler/gap=NAME"
    )
    assert fourth.startswith("JSON lines (trainer not recognised), 60 logged steps")
    told = json.loads(diagnose(path, "--json").stdout)
    assert told["not_found"] == ["KL", "sampler gap"]
    assert told["read"]["trainer"] is None
    assert told["read"]["metrics"] == {"reward": "reward", "learning_rate": "lr"}
    assert told["read"]["unknown_metrics"] == ["my/kl", "my/sampler_gap"]


def only_loss(write, path):
    entries = [{"step": n, "loss": 0.1, "grad_norm": 0.3, "my/kl": 15.0} for n in range(1, 61)]
    write(path, entries)
    return path


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (write_lines, "log.jsonl"),
        (write_trainer_state, "trainer_state.json"),
        (write_events, "events.out.tfevents.1.host.1.0"),
        (write_wandb, "run-1.wandb"),
    ],
)
def test_a_log_without_kl_reward_and_gap_is_unread(tmp_path, write, name):
    path = only_loss(write, tmp_path / name)
    ended = diagnose(path)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert "has no KL, no reward and no sampler gap under a name that klinic" in ended.stderr
    assert "my/kl. If one of these is the KL to the reference" in ended.stderr
    assert "--metric kl=NAME --metric reward=NAME" in ended.stderr
    as_json = diagnose(path, "--json")
    told = json.loads(as_json.stdout)
    assert as_json.returncode == 2
    assert (told["verdict"], told["ok"]) == ("unread", False)
    assert told["not_found"] == ["KL", "reward", "sampler gap"]


OWN_NAMES = {"KL div": "kl", "mean_reward": "reward", "gradNorm": "grad_norm", "lr": ""}


def write_own_table(path, separator, names=tuple(OWN_NAMES)):
    rows = [["iter", *names], *([n, 15.0, 0.5, 0.3, 1e-6] for n in range(1, 61))]
    path.write_text("".join(separator.join(map(str, row)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ","), ("a.tsv", "\t"), ("a.csv", ";")])
def test_a_table_of_an_own_loop_is_read_by_its_usual_names(tmp_path, name, separator):
    ended = diagnose(write_own_table(tmp_path / name, separator))
    assert ended.returncode == 1, ended.stderr
    assert "✗ kl-at-step-0: the KL is 15 nats per token in step 1" in ended.stdout
    read_as = "Read as: kl = KL div, reward = mean_reward, grad_norm = gradNorm, learning_rate = lr"
    assert sorted(read_as[9:].split(", ")) == sorted(line_of(ended, "Read as: ").split(", "))


def line_of(ended, start):
    return next(s for s in ended.stdout.splitlines() if s.startswith(start)).removeprefix(start)


def test_metrics_under_any_name_are_read_where_the_user_names_them(tmp_path):
    path = write_own_table(tmp_path / "a.csv", ",", ("d", "r", "g", "l"))
    unread = diagnose(path)
    assert (unread.returncode, unread.stdout) == (2, "")
    assert "has no metric that klinic knows, only d, r, g, l. If one of them is" in unread.stderr
    ended = diagnose(path, "--metric", "kl=d", "--metric", "reward=r")
    assert ended.returncode == 1
    assert "✗ kl-at-step-0: the KL is 15 nats per token in step 1" in ended.stdout
    assert line_of(ended, "Read as: ") == "kl = d, reward = r"
    assert line_of(ended, "Not read: ") == "g, l"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("kl=q", "a.csv: has no metric q. It has: iter, d, r, g, l."),
        ("kll=d", "--metric kll=d: kll is no metric of klinic. Did you mean kl?"),
        ("kl", "--metric kl: give klinic's name, =, and the log's name, such as --metric kl="),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_with_those_that_can(tmp_path, given, message):
    ended = diagnose(
        write_own_table(tmp_path / "a.csv", ",", ("d", "r", "g", "l")), "--metric", given
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert message in ended.stderr


def test_two_tables_with_the_same_metrics_are_two_runs(tmp_path):
    write_own_table(tmp_path / "a.csv", ",")
    write_own_table(tmp_path / "b.csv", ",")
    os.utime(tmp_path / "b.csv", (1, 1))
    report = json.loads(diagnose(tmp_path, "--json").stdout)
    assert report["read"]["files"] == [str(tmp_path / "a.csv")]
    assert report["read"]["not_read"] == [str(tmp_path / "b.csv")]


def test_tokens_of_prime_rl_are_judged_by_every_check(tmp_path):
    write_token_export(tmp_path / "token_exports", temperature=0.6, length=64)
    told = json.loads(diagnose(tmp_path, "--json").stdout)
    assert told["evidence"] == "records"
    assert told["read"]["format"] == "token export of prime-rl"
    statuses = {finding["name"]: finding["status"] for finding in told["findings"]}
    assert statuses["temperature-on-one-side"] == "confirmed"
    assert len(statuses) == len(CHECKS)
    assert told["ok"] is False
    ended = diagnose(tmp_path)
    assert ended.returncode == 1
    assert "Cause: temperature-on-one-side, first seen in step " in ended.stdout
    healthy_tokens = tmp_path / "healthy"
    write_token_export(healthy_tokens / "token_exports", length=64)
    assert diagnose(healthy_tokens).returncode == 0


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("nothing", None, "does not exist"),
        ("log.jsonl", b"hello\n", "line 1: is not a JSON object"),
        ("rollout.pt", b"\x80\x04", "is a pickle"),
        ("picture.png", b"\x89PNG", "is not a log that klinic reads"),
        ("e\x1b[2J.jsonl", b"\n", r"e\x1b[2J.jsonl"),
    ],
)
def test_what_cannot_be_read_exits_2_with_the_reason(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    ended = diagnose(tmp_path / name)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert ended.stdout == ""
    assert "\x1b" not in ended.stderr


def test_a_sign_is_explained():
    ended = subprocess.run(
        [*KLINIC, "explain", "kl-at-step-0"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "Look for a KL before the first update" in ended.stdout
    assert "record.logp_ref" in ended.stdout


def test_nothing_of_a_log_can_be_proved():
    plain, ended = diagnose(FIXTURES / "trl"), diagnose(FIXTURES / "trl", "--prove")
    assert ended.returncode == plain.returncode
    assert ended.stdout == (
        f"{plain.stdout}\nProof: not possible: --prove replays steps that klinic recorded, and "
        "this is the output of another trainer.\n"
    )


def test_hostile_names_are_shown_and_not_obeyed(tmp_path):
    entries = [{**entry, "\x1b[2Jx": 1.0} for entry in trl_entries(healthy(5))]
    ended = diagnose(write_lines(tmp_path / "\u202elog.jsonl", entries))
    assert ended.returncode == 0
    assert not {"\x1b", "\u202e"} & set(ended.stdout)


FORMATS = {**EXACT, **CONSOLES}
USUAL = ("trainer state", "json lines", "slime console", "wide csv")


@pytest.mark.parametrize(
    "kind",
    [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS],
)
def test_5001_steps_are_judged_in_a_second(tmp_path, kind):
    path = FORMATS[kind](tmp_path, trl_entries(healthy(5001)))
    allowed = 0.0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(3):
        allowed += allowed_seconds(1.0)
        assert diagnose(path).returncode in (0, 1)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # of computing: other processes may want the cores as well
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < allowed
