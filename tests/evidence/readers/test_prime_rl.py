"""prime-rl's token export as records that the checks of tokens judge."""

import json

import numpy as np
import pytest
from foreign_logs import write_token_export

from klinic.checks import CHECKS
from klinic.doctor.diagnosis import diagnose
from klinic.doctor.dump_diagnosis import dump_cases
from klinic.doctor.hypothesis import Status
from klinic.errors import EvidenceError
from klinic.evidence.readers import prime_rl_files
from klinic.evidence.readers.dumps import prime_rl_tokens
from klinic.evidence.readers.prime_rl import read_records


def test_a_record_has_the_completions_and_their_prompts(tmp_path):
    folder = write_token_export(tmp_path / "token_exports", steps=2)
    records = list(read_records(folder))
    assert [record.step for record in records] == [1, 2]
    first = records[0]
    assert (first.num_rows, first.num_tokens) == (16, 16 * 24)
    assert first.loss_mask.all()
    assert first.group.tolist() == [4 * (row // 4) for row in range(16)]
    assert first.prompt_ids[:4].tolist() == [0, 1, 0, 1]
    line = json.loads((folder / "step_1" / "rank_0.jsonl").read_text().splitlines()[5])
    row = slice(first.row_offsets[5], first.row_offsets[6])
    assert first.token_ids[row].tolist() == line["token_ids"][2:]
    assert first.logp_sampler[row].tolist() == line["inference_logprobs"][2:]
    assert first.logp[row].tolist() == line["trainer_logprobs"][2:]
    assert first.advantage[:2].tolist() == [1.0, -1.0]


def test_the_ranks_of_a_step_are_one_record(tmp_path):
    folder = write_token_export(tmp_path, steps=1)
    lines = (folder / "step_1" / "rank_0.jsonl").read_text().splitlines(keepends=True)
    (folder / "step_1" / "rank_0.jsonl").write_text("".join(lines[:10]))
    (folder / "step_1" / "rank_1.jsonl").write_text("".join(lines[10:]))
    (folder / "step_1" / "STABLE").touch()
    assert next(read_records(folder)).num_rows == 16


def test_null_is_a_log_prob_that_was_not_reported(tmp_path):
    folder = write_token_export(tmp_path, steps=1)
    path = folder / "step_1" / "rank_0.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    line["inference_logprobs"][5] = None
    path.write_text(json.dumps(line) + "\n")
    assert np.isnan(next(read_records(folder)).logp_sampler[3])


def test_a_temperature_on_one_side_is_seen_in_it_and_health_is(tmp_path):
    def statuses(folder):
        found = diagnose(dump_cases(prime_rl_tokens.open_dump(folder, {})), CHECKS)
        return {h.check.name: h.status for h in found.hypotheses}, found

    sick, _ = statuses(write_token_export(tmp_path / "sick", temperature=0.6, length=64))
    assert sick["temperature-on-one-side"] is Status.CONFIRMED
    well, found = statuses(write_token_export(tmp_path / "well", length=64))
    assert found.cause is None
    assert Status.CONFIRMED not in well.values()
    assert well["temperature-on-one-side"] is Status.RULED_OUT


def test_it_is_found_from_above(tmp_path):
    folder = write_token_export(tmp_path / "run" / "token_exports", steps=1)
    assert prime_rl_files.find_exports(tmp_path / "run") == folder
    assert prime_rl_files.find_exports(folder) == folder
    assert prime_rl_files.find_exports(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": 2}, "has schema 2"),
        ({"token_ids": "1 2"}, "`token_ids` is not a list of numbers"),
        ({"token_ids": [None] * 26}, "has an invalid id"),
        ({"token_ids": [10**30] * 26}, "has an invalid id"),
        ({"trainer_logprobs": [10**400] * 26}, "`trainer_logprobs` has"),
        ({"entropy": [0.1]}, "'entropy': 1"),
        ({"loss_mask": [False] * 26}, "at least one trained token"),
        ({"advantages": [[1.0]] * 26}, "`advantages` is not a list of numbers"),
    ],
)
def test_lines_that_are_damaged_are_refused(tmp_path, change, said):
    folder = write_token_export(tmp_path, steps=1)
    path = folder / "step_1" / "rank_0.jsonl"
    lines = path.read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), **change})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(EvidenceError, match=f"line 2: .*{said}"):
        list(read_records(folder))
