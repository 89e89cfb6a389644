"""`klinic convert`: dumps and logs as run folders, which give the same diagnosis."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "evidence" / "readers"))

from foreign_dumps import TEXTS, WRITERS, batches, write_nemo_rl, write_trl
from foreign_logs import healthy, trl_entries, write_lines, write_trainer_state

from klinic.doctor.dump_conversion import convert_run
from klinic.doctor.dump_diagnosis import diagnose_dump
from klinic.doctor.run_diagnosis import diagnose_run
from klinic.doctor.scalars.examine import examine_log
from klinic.errors import ConfigError, EvidenceError
from klinic.evidence import store
from klinic.evidence.readers.dumps.find import find_dumps
from klinic.evidence.readers.find import read_log
from klinic.evidence.run_facts import read_run_facts, read_tokens
from klinic.report.reading import read_run_report

LOG_PROBS = [name for name in WRITERS if name not in TEXTS and "open-instruct" not in name]


def no_progress(done, total):
    """Show nothing."""


def convert(folder, out, log=None):
    return convert_run(find_dumps(folder)[0].open(), log, out, no_progress)


def run_klinic(*words):
    return subprocess.run(
        [sys.executable, "-P", "-m", "klinic.cli", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def statuses(diagnosis):
    return {h.check.name: h.status for h in diagnosis.hypotheses}


@pytest.mark.parametrize("name", WRITERS)
def test_a_converted_run_has_the_diagnosis_of_its_dump(tmp_path, name):
    folder = WRITERS[name](tmp_path / "dump", steps=2)
    before = diagnose_dump(find_dumps(folder)[0].open(), None, no_progress).records
    convert(folder, tmp_path / "run")
    after = diagnose_run(tmp_path / "run")
    assert not after.sick
    assert after.cause == before.cause
    for name_of_check, status in statuses(before).items():
        # metrics.jsonl decides more than the dump
        assert statuses(after)[name_of_check] == status or status == "undecided"


@pytest.mark.parametrize("name", LOG_PROBS)
def test_a_sick_run_stays_sick(tmp_path, name):
    convert(WRITERS[name](tmp_path / "dump", steps=2, shift=1), tmp_path / "run")
    assert diagnose_run(tmp_path / "run").cause == "misaligned-logp"


def test_records_and_facts_are_those_of_the_dump(tmp_path):
    folder = write_nemo_rl(tmp_path / "dump")
    convert(folder, tmp_path / "run")
    assert store.complete_steps(tmp_path / "run") == [1, 2, 3, 4]
    facts = read_run_facts(tmp_path / "run")
    assert (facts["trainer"], facts["advantage"]) == ("nemo-rl", "group_std")
    for record, batch in zip(find_dumps(folder)[0].open().read_records(), batches(), strict=True):
        written = store.read_record(tmp_path / "run", record.step)
        for name in ("token_ids", "logp_sampler", "logp_old", "reward", "advantage", "group"):
            assert np.array_equal(getattr(written, name), getattr(record, name)), name
        assert written.num_rows == len(batch.rows)


def test_scalars_become_metrics_and_records_come_first(tmp_path):
    write_trl(tmp_path / "dump")
    entries = [{**e, "kl": 0.5, "reward": 99.0} for e in trl_entries(healthy(6))]
    write_trainer_state(tmp_path / "dump" / "trainer_state.json", entries)
    convert(tmp_path / "dump", tmp_path / "run", read_log(tmp_path / "dump"))
    lines = [json.loads(li) for li in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert {line["kl"] for line in lines} == {0.5}
    assert lines[0]["reward"] < 1
    assert lines[5]["reward"] == 99.0
    assert store.read_record(tmp_path / "run", 1).facts["grad_norm"] == entries[0]["grad_norm"]
    assert not any(name.startswith("completions/mean_length") for name in lines[0])


def test_the_report_of_a_converted_run_has_texts_and_curves(tmp_path):
    convert(write_trl(tmp_path / "dump", steps=2), tmp_path / "run")
    texts = read_tokens(tmp_path / "run")
    assert texts[ord("1")] == "1"
    page = read_run_report(tmp_path / "run")
    assert page.curves.series("reward")[0] == [1, 2]
    assert page.heat


def test_a_log_alone_becomes_metrics(tmp_path):
    path = write_lines(tmp_path / "log.jsonl", trl_entries(healthy(5)))
    result = convert_run(None, read_log(path), tmp_path / "run", no_progress)
    assert result.metric_steps == [1, 2, 3, 4, 5]
    assert read_run_facts(tmp_path / "run")["trainer"] == "trl"
    again = read_log(tmp_path / "run" / "metrics.jsonl")
    assert again.column("kl") == read_log(path).column("kl")


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("sampling/sampling_logp_difference/mean", 0.4),
        ("training/rollout_probs_diff_mean", 0.4),
        ("gen_kl_error", 0.4),
        ("token_mult_prob_error", 3.0),
    ],
)
def test_a_sampler_gap_that_is_converted_is_still_a_sign(tmp_path, metric, value):
    entries = [{"step": e["step"], "reward": e["reward"], metric: value} for e in healthy(40)]
    log = read_log(write_lines(tmp_path / "log.jsonl", entries))
    convert_run(None, log, tmp_path / "run", no_progress)
    assert examine_log(log).sick
    assert examine_log(read_log(tmp_path / "run")).sick


def test_what_exists_is_not_written_over(tmp_path):
    folder = write_nemo_rl(tmp_path / "dump", steps=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("x")
    for out in (tmp_path / "run", tmp_path / "run" / "mine.txt"):
        with pytest.raises(ConfigError, match="not an empty folder"):
            convert(folder, out)
    assert (tmp_path / "run" / "mine.txt").read_text() == "x"


def test_a_dump_that_breaks_off_leaves_no_run(tmp_path):
    folder = write_nemo_rl(tmp_path / "dump", steps=2)
    (folder / "train_data_step2.jsonl").write_text("{}\n{}\n")
    with pytest.raises(EvidenceError, match=r"train_data_step2\.jsonl, line 1"):
        convert(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_command_says_what_it_read_and_what_comes_next(tmp_path):
    write_trl(tmp_path / "dump", steps=2)
    ended = run_klinic("convert", tmp_path / "dump", tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("Completions of TRL, 2 steps: ")
    assert "Read: texts, group, reward, advantage. Not in this format: token ids" in ended.stdout
    assert f"Next: klinic diagnose {tmp_path / 'run'}" in ended.stdout
    again = run_klinic("convert", tmp_path / "run", tmp_path / "other", "--json")
    assert again.returncode == 2
    assert "has klinic's format" in again.stderr
    told = json.loads(run_klinic("convert", tmp_path / "dump", tmp_path / "two", "--json").stdout)
    assert (told["ok"], told["steps"], told["format"]) == (True, 2, "completions of TRL")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dump/train_data/3.pt", "is a dump of slime in torch's file format"),
        ("dump/train_data/3_1.pt", "is a dump of miles in torch's file format"),
        ("dump/dumped_data/global_step_3_training_input.pkl", "is a pickle of SkyRL"),
        ("dump/dumped_data/global_step_3_training_input.pt", "is a dump of SkyRL in torch's"),
    ],
)
def test_files_of_torch_are_refused_with_the_command_that_reads_them(tmp_path, name, words):
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_bytes(b"PK\x03\x04")
    for path in (tmp_path / "dump", tmp_path / name):
        with pytest.raises(EvidenceError, match=words) as refused:
            read_log(path)
        assert "klinic convert" in str(refused.value)


def test_a_log_beside_files_of_torch_is_read_and_says_so(tmp_path):
    write_lines(tmp_path / "log.jsonl", trl_entries(healthy(5)))
    (tmp_path / "train_data").mkdir()
    (tmp_path / "train_data" / "0.pt").write_bytes(b"PK\x03\x04")
    assert "klinic convert" in read_log(tmp_path).also[0]
