"""`klinic diagnose` of another trainer's output folder: its dumps, joined with its scalars."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "evidence" / "readers"))

from foreign_dumps import WRITERS, write_nemo_rl, write_trl
from foreign_logs import healthy, trl_entries, write_trainer_state

from klinic.checks import CHECKS

READERS = Path(__file__).parents[1] / "evidence" / "readers"
KLINIC = [sys.executable, "-P", "-m", "klinic.cli"]


def diagnose(path, *flags):
    return subprocess.run(
        [*KLINIC, "diagnose", str(path), *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_an_output_folder_of_trl_is_enough():
    ended = diagnose(READERS / "own_writers" / "trl")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("Completions of TRL, 4 steps, 1 to 4: ")
    assert lines[1] == (
        "Read: texts, group, reward, advantage. Not in this format: token ids, log-probs, finish "
        "reasons."
    )
    assert lines[2] == f"5 of {len(CHECKS)} checks have the evidence they need."
    assert lines[3].startswith("Scalars: trainer_state.json, ")
    assert lines[3].endswith("joined by step: grad_norm, learning_rate.")
    assert "Present but not read: " in lines[4]
    assert "train.log" in lines[4]
    assert f"No fault found: 5 of {len(CHECKS)} checks passed, none failed." in ended.stdout


def test_a_sick_dump_names_its_cause_and_the_fix(tmp_path):
    write_nemo_rl(tmp_path, shift=1)
    ended = diagnose(tmp_path)
    assert ended.returncode == 1
    assert "ause: misaligned-logp" in ended.stdout
    told = json.loads(diagnose(tmp_path, "--json").stdout)
    assert (told["ok"], told["causes"][0]["name"]) == (False, "misaligned-logp")
    assert told["verdict"] in ("likely", "cause")
    assert told["read"]["format"] == "training data of NeMo-RL"
    assert told["read"]["fields"][-2:] == ["logp_sampler", "logp_old"]
    assert told["causes"][0]["steps"]  # in NeMo-RL's settings


def test_traces_that_are_joined_are_not_listed_as_unread():
    lines = diagnose(READERS / "own_writers" / "prime_rl").stdout.splitlines()
    assert lines[0].startswith("Token export of prime-rl, step 2: ")
    assert "reward" in lines[1]
    assert not any("Present but not read" in line for line in lines)


def test_an_output_folder_of_several_starts_is_its_newest(tmp_path):
    for number, name in enumerate(("v0-2026", "v1-2026")):
        write_trl(tmp_path / name, steps=1)
        os.utime(tmp_path / name, (1e9 + number, 1e9 + number))
    assert f"{tmp_path / 'v1-2026'}/completions" in diagnose(tmp_path).stdout.splitlines()[0]
    (tmp_path / "v0-2026" / "records" / "step=000001").mkdir(parents=True)
    (tmp_path / "v0-2026" / "records" / "step=000001" / "complete.json").touch()
    assert f"has a run: v0-2026. Give {tmp_path / 'v0-2026'}" in diagnose(tmp_path).stderr


def test_the_logs_folder_of_nemo_rl_is_found_in_its_output_folder(tmp_path):
    write_nemo_rl(tmp_path / "logs" / "exp_001")
    assert f"{tmp_path / 'logs' / 'exp_001'}" in diagnose(tmp_path).stdout.splitlines()[0]


def test_scalars_in_the_folder_of_the_dump_are_joined(tmp_path):
    write_nemo_rl(tmp_path / "exp_001")
    write_trainer_state(tmp_path / "exp_001" / "trainer_state.json", trl_entries(healthy(4)))
    assert "joined by step: grad_norm" in diagnose(tmp_path).stdout


def test_signs_of_the_scalars_count_if_the_dump_is_well(tmp_path):
    write_trl(tmp_path)
    entries = [{**entry, "kl": 15.0} for entry in trl_entries(healthy(60))]
    write_trainer_state(tmp_path / "trainer_state.json", entries)
    ended = diagnose(tmp_path)
    assert ended.returncode == 1
    assert "Scalars: Something is wrong: kl-at-step-0, first seen in step 1." in ended.stdout
    told = json.loads(diagnose(tmp_path, "--json").stdout)
    assert (told["ok"], told["verdict"], told["cause"]) == (False, "likely", None)
    assert told["causes"] == told["scalars"]["causes"] != []
    assert "No fault found" not in ended.stdout
    assert "Token records: no check failed" in ended.stdout


def test_facts_of_a_run_json_decide_more(tmp_path):
    write_nemo_rl(tmp_path)
    before = json.loads(diagnose(tmp_path, "--json").stdout)["read"]["decided"]
    facts = {"schema": 2, "sampling": {"temperature": 1.0}, "vocabulary_size": 32}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    told = json.loads(diagnose(tmp_path, "--json").stdout)
    assert told["read"]["decided"] > before
    assert told["read"]["facts"]["vocabulary_size"] == 32
    (tmp_path / "run.json").write_text('{"of": "another program"}')
    assert json.loads(diagnose(tmp_path, "--json").stdout)["read"]["decided"] == before


@pytest.mark.parametrize("name", ["training data of NeMo-RL", "completions of TRL"])
def test_a_damaged_dump_exits_2_with_a_sentence(tmp_path, name):
    WRITERS[name](tmp_path, steps=1)
    path = next(p for p in tmp_path.rglob("*") if p.suffix in (".jsonl", ".parquet"))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + b"\n{}\n")
    ended = diagnose(tmp_path)
    assert ended.returncode == 2
    assert path.name in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""
