"""A run as cases: what is kept of its metrics, and which of them a case may see."""

import json
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis.strategies import integers

from evidence.records import full_record
from klinic.checks import malformed_output, reward_hacking
from klinic.checks.base import Case
from klinic.doctor.cases import ENDS, WINDOW, CaseBuilder, read_cases
from klinic.evidence import store
from klinic.evidence.fields import METRICS


def write_run(folder, lines, steps=(2, 4)):
    for step in steps:
        store.write_record(folder, full_record(step=step))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_only_metrics_that_checks_read_are_kept():
    cases = CaseBuilder({})
    cases.add_metrics(1, {**dict.fromkeys(METRICS, 0.5), "time/step": 3.0, "loss": 1.0})
    assert cases.next_case(full_record(), {}).metrics == {1: dict.fromkeys(METRICS, 0.5)}


def test_an_evaluation_stands_with_its_step():
    cases = CaseBuilder({})
    cases.add_metrics(1, {"reward": 0.5})
    cases.add_metrics(1, {"eval/accuracy": 0.25})
    assert cases.next_case(full_record(), {}).metrics == {1: {"reward": 0.5, "eval/accuracy": 0.25}}


def test_a_case_sees_the_metrics_up_to_its_step_in_whatever_order_they_were_written(tmp_path):
    told = [{"step": step, "reward": step / 10} for step in (5, 3, 1, 4, 2)]
    told += [{"step": 2, "eval/accuracy": 0.5}]
    seen = [sorted(case.metrics) for case in read_cases(write_run(tmp_path, told))]
    assert seen == [[1, 2], [1, 2, 3, 4]]
    last: Case = list(read_cases(tmp_path))[-1]
    assert last.metrics[2] == {"reward": 0.2, "eval/accuracy": 0.5}


def metrics_of_a_long_run(
    draws: np.random.Generator, num_steps: int
) -> dict[int, dict[str, float]]:
    """A reward at every step, an evaluation at every seventh, sometimes an answer rate."""
    lines = {}
    for step in range(1, num_steps + 1):
        line = {"reward": draws.random() + step / num_steps}
        if step % 7 == 0:
            line["eval/accuracy"] = draws.random()
        if draws.random() < 0.5:
            line["completions/parse_rate"] = draws.random() / 3
        lines[step] = line
    return lines


@given(seed=integers(0, 10_000), num_steps=integers(1, 400))
def test_the_ends_of_a_run_say_what_all_of_it_says(seed, num_steps):
    lines = metrics_of_a_long_run(np.random.default_rng(seed), num_steps)
    cases = CaseBuilder({})
    for step, line in lines.items():
        cases.add_metrics(step, line)
    kept = cases.next_case(full_record(step=num_steps), {})
    whole = replace(kept, metrics=lines)
    for check in (reward_hacking.CHECK, malformed_output.CHECK):
        one, other = check(kept), check(whole)
        assert (one.verdict, one.measured) == (other.verdict, other.measured)


def test_what_is_kept_of_the_metrics_does_not_grow_with_the_run():
    cases = CaseBuilder({})
    for step in range(5000):
        cases.add_metrics(
            step, {"reward": 0.5, **({"eval/accuracy": 0.5} if step % 50 == 0 else {})}
        )
        cases.add_metrics(step, {"time/step": 3.0})
    kept = cases.next_case(full_record(step=5000), {}).metrics
    assert sum("reward" in line for line in kept.values()) == 2 * ENDS
    assert sum("eval/accuracy" in line for line in kept.values()) == 2 * ENDS
    assert len(kept) <= 4 * ENDS
    assert {0, 50, 4950, 4999} <= kept.keys()


def test_a_metric_that_is_told_again_counts_once():
    cases = CaseBuilder({})
    for step in (*range(3 * ENDS), 2 * ENDS, 3 * ENDS - 1):
        cases.add_metrics(step, {"reward": 0.5})
    kept = cases.next_case(full_record(step=3 * ENDS), {}).metrics
    assert len(kept) <= 2 * ENDS


def test_lines_without_a_step_belong_to_nobody(tmp_path):
    run = write_run(tmp_path, [{"reward": 1.0}, {"step": 1, "reward": 0.5}])
    assert list(read_cases(run))[-1].metrics == {1: {"reward": 0.5}}


def test_a_record_is_measured_once_while_it_is_looked_at_and_forgotten_afterwards():
    asked = []

    def measure(record):
        asked.append(record.step)
        return record.step

    cases = CaseBuilder({})
    for step in range(1, WINDOW + 5):
        case = cases.next_case(full_record(step=step), {})
        assert [case.measure_once(measure, r) for r in case.recent_records] == [
            r.step for r in case.recent_records
        ]
    assert asked == list(range(1, WINDOW + 5))
    held = {id(record) for record, _ in case.measure_cache.values()}
    assert held <= {id(record) for record in (*case.recent_records, case.start)}
