"""A budget of records drops the oldest, and never evidence that something else needs."""

import json

import pytest

from evidence.records import full_record
from klinic.doctor.cases import WINDOW
from klinic.doctor.run_diagnosis import diagnose_run
from klinic.errors import ConfigError
from klinic.evidence import store
from klinic.evidence.dropped_records import read_dropped
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import EVENTS
from klinic.recipe.loading import from_keywords
from klinic.training.record_budget import RecordKeeper


def train(run, setting, num_steps, evidence=(), first=1):
    """Write records as a run does, and let the keeper drop old ones after each."""
    journal = Journal(run / EVENTS)
    keeper = RecordKeeper(run, setting, journal.append)
    for step in range(first, num_steps + 1):
        store.write_record(run, full_record(step=step))
        keeper.drop_old(step, [s for s in evidence if s <= step])
        if keeper._pending is not None:
            keeper._pending.result()
    keeper.close()


def test_the_newest_steps_and_the_first_stay(tmp_path):
    train(tmp_path, 40, 100)
    steps = store.complete_steps(tmp_path)
    assert steps[0] == 1
    assert steps[1:] == list(range(steps[1], 101))
    assert 36 <= len(steps) <= 41  # a step is dropped after the next one
    dropped = read_dropped(tmp_path, steps)
    assert (dropped.num_steps, dropped.first, dropped.last) == (100 - len(steps), 2, steps[1] - 1)
    assert len(list(Journal(tmp_path / EVENTS).entries())) <= (100 - 40) / 4 + 1


def test_damaged_events_hide_no_record(tmp_path):
    (tmp_path / EVENTS).write_text('{"event": "records dropped", "steps": [[2, 3]]}\nbroken\n')
    assert read_dropped(tmp_path, [1]).to_json() is None


def test_a_budget_of_bytes_is_kept(tmp_path):
    store.write_record(tmp_path, full_record(step=1))
    size = store.record_bytes(tmp_path, 1)
    train(tmp_path, f"{60 * size / 1e6:.3f} MB", 150)
    total = sum(store.record_bytes(tmp_path, step) for step in store.complete_steps(tmp_path))
    assert 50 * size < total < 62 * size


def test_the_evidence_of_a_cause_and_the_windows_of_checkpoints_stay(tmp_path):
    (tmp_path / "checkpoints" / "step=000060").mkdir(parents=True)
    train(tmp_path, 25, 120, evidence=[30])
    steps = set(store.complete_steps(tmp_path))
    assert steps >= {1, *range(30 - WINDOW, 31), *range(60 - WINDOW, 61), *range(100, 121)}
    assert not steps & {*range(2, 30 - WINDOW), *range(31, 60 - WINDOW), *range(61, 90)}


def test_what_cannot_be_read_is_not_dropped(tmp_path):
    train(tmp_path, 40, 40)
    path = store.step_folder(tmp_path, 3) / "part-00000.parquet"
    path.write_bytes(path.read_bytes()[:-3])
    train(tmp_path, 40, 100, first=41)
    assert store.complete_steps(tmp_path)[:2] == [1, 3]
    assert path.exists()


def test_without_a_budget_nothing_is_dropped(tmp_path):
    train(tmp_path, None, 60)
    assert len(store.complete_steps(tmp_path)) == 60
    assert not (tmp_path / EVENTS).exists()


def test_the_diagnosis_says_what_it_could_not_judge(tmp_path):
    train(tmp_path, 2, 30)
    diagnosis = diagnose_run(tmp_path)
    num = 30 - len(store.complete_steps(tmp_path))
    assert diagnosis.to_json()["dropped"]["num_steps"] == num
    assert diagnosis.dropped.sentence.startswith(f"Not judged: {num} steps from 2 to ")


def test_steps_that_were_recorded_again_are_not_dropped_ones(tmp_path):
    train(tmp_path, 25, 70)
    for step in (2, 3):
        store.write_record(tmp_path, full_record(step=step))
    steps = store.complete_steps(tmp_path)
    assert read_dropped(tmp_path, steps).num_steps == 70 - len(steps)


@pytest.mark.parametrize(
    "steps", [None, [[5, 2]], [[1, 10**40]], [["a", "b"]], [[True, 2]], [1], {"a": 1}, [[1]]]
)
def test_an_event_that_lists_no_steps_is_skipped(tmp_path, steps):
    line = json.dumps({"step": 1, "event": "records dropped", "steps": steps})
    (tmp_path / EVENTS).write_text(line + "\n")
    assert read_dropped(tmp_path, [1]).num_steps == 0


@pytest.mark.parametrize("value", [0, -1, True, "20", "GB", "0 GB", "1e9 GB", "20 PB", 1.5])
def test_other_budgets_are_refused(value):
    with pytest.raises(ConfigError, match="keep_records"):
        from_keywords(model="tiny", task="arithmetic", output={"keep_records": value})


@pytest.mark.parametrize("value", [200, "20 GB", "1.5TB", None])
def test_steps_and_sizes_are_budgets(value):
    loaded = from_keywords(model="tiny", task="arithmetic", output={"keep_records": value})
    assert loaded.recipe.output.keep_records == value
