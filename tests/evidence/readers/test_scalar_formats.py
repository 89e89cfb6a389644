"""CSV, JSON, printed text, trackio and MLflow: each read as the same run in JSON lines is."""

import sqlite3
import time

import pytest
from foreign_logs import healthy, trl_entries
from foreign_texts import (
    CONSOLES,
    EXACT,
    dicts_behind_bars,
    printed_dicts,
    write_chart,
    write_charts,
    write_text,
)

from klinic.errors import EvidenceError
from klinic.evidence.readers.find import read_log

ENTRIES = trl_entries(healthy(30))
KL = tuple(entry["kl"] for entry in ENTRIES)


@pytest.mark.parametrize("name", EXACT)
def test_every_format_gives_the_same_columns(tmp_path, name):
    log = read_log(EXACT[name](tmp_path, ENTRIES))
    assert log.steps == tuple(range(1, 31))
    assert log.column("kl") == KL
    assert log.column("reward") == tuple(entry["reward"] for entry in ENTRIES)
    assert not log.steps_are_counted


def test_charts_of_one_run_are_one_log(tmp_path):
    log = read_log(write_charts(tmp_path, ENTRIES))
    assert set(log.columns) == {"kl", "reward", "loss"}
    assert read_log(tmp_path / "wandb_kl.csv").column("kl") == KL


def test_the_column_of_steps_is_no_unread_metric(tmp_path):
    path = write_text(tmp_path / "x.csv", ["Step,Global Step,kl,other\n", "1,1,0.1,2\n"])
    assert read_log(path).unknown == ("other",)


def test_charts_of_two_runs_are_not_mixed(tmp_path):
    write_chart(tmp_path / "a.csv", ENTRIES, "kl", run="one")
    write_chart(tmp_path / "b.csv", ENTRIES, "reward", run="two")
    with pytest.raises(EvidenceError, match=r"2 runs \(one, two\).*Export one run"):
        read_log(tmp_path)


def test_an_empty_cell_is_not_logged_and_a_nan_is_nan(tmp_path):
    path = write_text(tmp_path / "x.csv", ["step,kl,reward\n", "1,,0.5\n", "2,nan,0.5\n"])
    column = read_log(path).column("kl")
    assert column[0] is None
    assert column[1] != column[1]


def test_printed_dicts_are_counted_unless_a_bar_numbers_them(tmp_path):
    log = read_log(write_text(tmp_path / "train.log", printed_dicts(ENTRIES)))
    assert log.steps_are_counted
    assert log.trainer.name == "TRL"
    assert log.column("kl") == pytest.approx(KL, rel=1e-5)
    bars = dicts_behind_bars(ENTRIES)
    log = read_log(write_text(tmp_path / "bar.log", bars))
    assert log.steps == tuple(range(10, 301, 10))
    late = [bars[0], bars[0], *bars[2:]]  # the bar was not drawn in time
    assert read_log(write_text(tmp_path / "late.log", late)).steps_are_counted


def test_verl_is_recognised_by_its_console(tmp_path):
    assert read_log(EXACT["verl console"](tmp_path, ENTRIES)).trainer.name == "verl"


def test_prime_rls_console_is_read(tmp_path):
    log = read_log(CONSOLES["prime-rl console"](tmp_path, ENTRIES))
    assert log.column("sampler/kl") == tuple(float(f"{value:.4f}") for value in KL)
    assert log.column("grad_norm")[0] == 0.1
    assert log.steps == tuple(range(1, 31))


def test_nemo_rls_console_is_read(tmp_path):
    log = read_log(CONSOLES["nemo-rl console"](tmp_path, ENTRIES))
    assert log.steps == tuple(range(1, 31))
    assert set(log.column("sampler/kl")) == {0.0123}
    assert log.column("reward") == tuple(float(f"{e['reward']:.4f}") for e in ENTRIES)


def test_prose_with_numbers_is_no_log(tmp_path):
    text = "The kl: 3 and the loss = 2 of chapter 4.\nMore words, 17 of them.\n" * 3
    (tmp_path / "notes.txt").write_text(text.replace("kl: 3 and the ", ""))
    with pytest.raises(EvidenceError, match="has no records"):
        read_log(tmp_path)
    with pytest.raises(EvidenceError, match=r"no entries|no metric"):
        read_log(tmp_path / "notes.txt")


def test_a_view_in_a_database_is_refused(tmp_path):
    path = tmp_path / "x.db"
    database = sqlite3.connect(path)
    database.execute(
        "CREATE VIEW metrics AS WITH RECURSIVE c(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM c) "
        "SELECT id, 'r' AS run_name, id AS step, '{}' AS metrics FROM c"
    )
    database.close()
    with pytest.raises(EvidenceError, match="has no table `metrics`"):
        read_log(path)


def test_a_name_that_is_not_utf_8_in_a_database_is_read(tmp_path):
    path = EXACT["trackio"](tmp_path, ENTRIES)
    path.write_bytes(path.read_bytes().replace(b"newer", b"new\xc3r"))
    assert read_log(path).column("kl") == KL


def test_a_broken_schema_that_is_not_utf_8_is_refused(tmp_path):
    path = EXACT["trackio"](tmp_path, ENTRIES)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"metrics (id INTEGER", b"metrics \xc3id INTEGER"))
    with pytest.raises(EvidenceError, match="is not a database of trackio"):
        read_log(path)


def test_other_databases_and_lists_are_refused(tmp_path):
    database = sqlite3.connect(tmp_path / "x.db")
    database.execute("CREATE TABLE other (a)")
    database.close()
    for path in (tmp_path / "x.db", write_text(tmp_path / "x.json", ["[1, 2]"])):
        with pytest.raises(EvidenceError):
            read_log(path)


def test_a_line_of_a_megabyte_is_no_hang(tmp_path):
    for filler in ("a" * 10**6, "a:" * 500_000, "a " * 500_000, "loss: 1 " * 120_000):
        path = write_text(tmp_path / "x.log", [filler, "\n", "step 1: {'kl': 0.5, 'reward': 1}\n"])
        start = time.process_time()
        assert read_log(path).column("kl")[-1] == 0.5
        assert time.process_time() - start < 2.0
