"""A run as cases: what is kept of its metrics, and which of them a case may see."""

import json

from evidence.records import full_record
from klinic.checks.base import Case
from klinic.doctor.reading import WINDOW, Cases, read_cases
from klinic.evidence import store
from klinic.evidence.fields import METRICS


def write_run(folder, lines, steps=(2, 4)):
    for step in steps:
        store.write_record(folder, full_record(step=step))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_only_metrics_that_checks_read_are_kept():
    cases = Cases({})
    cases.tell(1, {**dict.fromkeys(METRICS, 0.5), "time/step": 3.0, "loss": 1.0})
    assert cases.next(full_record(), {}).metrics == {1: dict.fromkeys(METRICS, 0.5)}


def test_an_evaluation_stands_with_its_step():
    cases = Cases({})
    cases.tell(1, {"reward": 0.5})
    cases.tell(1, {"eval/accuracy": 0.25})
    assert cases.next(full_record(), {}).metrics == {1: {"reward": 0.5, "eval/accuracy": 0.25}}


def test_a_case_sees_the_metrics_up_to_its_step_in_whatever_order_they_were_written(tmp_path):
    told = [{"step": step, "reward": step / 10} for step in (5, 3, 1, 4, 2)]
    told += [{"step": 2, "eval/accuracy": 0.5}]
    seen = [sorted(case.metrics) for case in read_cases(write_run(tmp_path, told))]
    assert seen == [[1, 2], [1, 2, 3, 4]]
    last: Case = list(read_cases(tmp_path))[-1]
    assert last.metrics[2] == {"reward": 0.2, "eval/accuracy": 0.5}


def test_lines_without_a_step_belong_to_nobody(tmp_path):
    run = write_run(tmp_path, [{"reward": 1.0}, {"step": 1, "reward": 0.5}])
    assert list(read_cases(run))[-1].metrics == {1: {"reward": 0.5}}


def test_a_record_is_measured_once_while_it_is_looked_at_and_forgotten_afterwards():
    asked = []

    def measure(record):
        asked.append(record.step)
        return record.step

    cases = Cases({})
    for step in range(1, WINDOW + 5):
        case = cases.next(full_record(step=step), {})
        assert [case.of(measure, r) for r in case.window] == [r.step for r in case.window]
    assert asked == list(range(1, WINDOW + 5))
    held = {id(record) for record, _ in case.measured.values()}
    assert held <= {id(record) for record in (*case.window, case.start)}
