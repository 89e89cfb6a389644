"""trainer_state.json: what is of training, where it is found, and what is refused."""

import json
import math

import pytest
from foreign_logs import healthy, trl_entries, write_trainer_state

from klinic.errors import EvidenceError
from klinic.evidence.readers.find import read_log


def test_entries_of_training_alone_are_read(tmp_path):
    entries = trl_entries(healthy(30))
    log = read_log(write_trainer_state(tmp_path / "trainer_state.json", entries))
    assert log.trainer.name == "TRL"
    assert log.steps == tuple(range(1, 31))
    assert log.column("kl") == tuple(entry["kl"] for entry in entries)  # not the eval_kl of 9
    assert log.written_as["sampler/gap"] == "sampling/sampling_logp_difference/mean"
    assert log.num_skipped == 0


def test_the_last_checkpoint_is_read_and_not_the_last_by_name(tmp_path):
    entries = trl_entries(healthy(120))
    for step in (9, 90, 120):
        state = tmp_path / f"checkpoint-{step}" / "trainer_state.json"
        write_trainer_state(state, entries[:step])
    log = read_log(tmp_path)
    assert log.files == (tmp_path / "checkpoint-120" / "trainer_state.json",)
    assert log.steps[-1] == 120


def test_the_state_of_the_folder_itself_comes_first(tmp_path):
    entries = trl_entries(healthy(12))
    write_trainer_state(tmp_path / "checkpoint-99" / "trainer_state.json", entries[:5])
    write_trainer_state(tmp_path / "trainer_state.json", entries)
    assert len(read_log(tmp_path).steps) == 12


def test_entries_of_ten_steps_say_so(tmp_path):
    entries = trl_entries(healthy(60), every=10)
    log = read_log(write_trainer_state(tmp_path / "trainer_state.json", entries))
    assert (log.steps[0], log.log_interval, len(log.steps)) == (10, 10, 6)


def test_nan_null_and_absence_are_told_apart(tmp_path):
    entries = trl_entries(healthy(4))
    entries[1]["kl"] = math.nan
    entries[2]["kl"] = None
    del entries[3]["kl"]
    log = read_log(write_trainer_state(tmp_path / "trainer_state.json", entries))
    kl = log.column("kl")
    assert math.isnan(kl[1])
    assert math.isnan(kl[2])
    assert kl[3] is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"global_step": 3}, "no list `log_history`"),
        ({"log_history": {"step": 1}}, "no list `log_history`"),
        ({"log_history": [3]}, "entry 1 of `log_history` is not an object"),
        ({"log_history": []}, "has no entries"),
        ({"log_history": [{"step": 1, "accuracy": 0.5}]}, "no metric that klinic knows"),
        ([], "has no entries"),
        ([3], "is a JSON list, and not a list with one object of metrics per step"),
    ],
)
def test_other_json_is_refused_with_the_reason(tmp_path, content, said):
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps(content))
    with pytest.raises(EvidenceError, match=said):
        read_log(path)


def test_a_file_that_was_cut_is_refused(tmp_path):
    path = write_trainer_state(tmp_path / "trainer_state.json", trl_entries(healthy(5)))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(EvidenceError, match="is not JSON"):
        read_log(path)
