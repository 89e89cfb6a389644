"""Dumps of slime, miles and SkyRL in torch's file format, loaded without executing anything."""

import io
import pickle
import random
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "evidence" / "readers"))

import torch
from foreign_dumps import GROUP, batches

from klinic.doctor.dump_conversion import convert_run
from klinic.doctor.dump_diagnosis import diagnose_dump
from klinic.errors import EvidenceError
from klinic.evidence.readers.dumps.torch_files import SKYRL_COMMAND, find_torch_dump
from klinic.integrations.torch_dumps import open_torch_dump
from klinic.report.reading import read_run_report

OWN = Path(__file__).parents[1] / "evidence" / "readers" / "own_writers" / "slime"
pytestmark = pytest.mark.torch


def no_progress(done, total):
    """Show nothing."""


def sample(row, index, position):
    ids = row["prompt"] + row["completion"]
    columns = {
        "rollout_log_probs": row["logp_sampler"],
        "log_probs": row["logp_old"],
        "ref_log_probs": row["logp_ref"],
        "entropy": row["entropy"],
        "advantages": [row["advantage"]] * len(row["completion"]),
    }
    return {
        "tokens": torch.tensor(ids),
        "response_lengths": len(row["completion"]),
        "total_lengths": len(ids),
        "loss_masks": torch.ones(len(row["completion"]), dtype=torch.int32),
        "truncated": 1,
        "sample_index": index,
        "rollout_position": position,
        **{name: torch.tensor(values) for name, values in columns.items()},
    }


def save(value, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


def save_rollouts(folder, batch):
    first = (batch.step - 1) * len(batch.rows)
    samples = [
        {
            "group_index": (first + i) // GROUP,
            "index": first + i,
            "tokens": row["prompt"] + row["completion"],
            "response_length": len(row["completion"]),
            "reward": row["reward"],
            "loss_mask": [1] * len(row["completion"]),
            "rollout_log_probs": row["logp_sampler"],
            "status": "truncated",
            "metadata": {},
        }
        for i, row in enumerate(batch.rows)
    ]
    number = batch.step - 1
    save({"rollout_id": number, "samples": samples}, folder / f"rollout_data/{number}.pt")


def write_slime(folder, *, trained=True, **how):
    for batch in batches(**how):
        save_rollouts(folder, batch)
        first, number = (batch.step - 1) * len(batch.rows), batch.step - 1
        rows = [sample(row, first + i, i) for i, row in enumerate(batch.rows)]
        content = {
            "format_version": 2,
            "samples": rows,
            "dp_shards": [],
            "raw_reward": [row["reward"] for row in batch.rows],
        }
        if trained:
            save(content, folder / f"train_data/{number}.pt")
    return folder


def write_miles(folder, *, cp_size=1, **how):
    for batch in batches(**how):
        save_rollouts(folder, batch)
        first, number = (batch.step - 1) * len(batch.rows), batch.step - 1
        rows = [sample(row, first + i, i) for i, row in enumerate(batch.rows)]
        for rank in range(2):
            part = [{**row} for row in rows[rank::2]]
            indices = [row.pop("sample_index") for row in part]
            columns = {name: [row[name] for row in part] for name in part[0]}
            del columns["rollout_position"]
            data = {**columns, "sample_indices": indices}
            content = {"rollout_id": number, "rank": rank, "rollout_data": data, "cp_size": cp_size}
            save(content, folder / f"train_data/{number}_{rank}.pt")
    return folder


def write_skyrl(folder, **how):
    for batch in batches(**how):
        rows = batch.rows
        sizes = [len(r["prompt"]) + len(r["completion"]) for r in rows]
        total, longest = max(sizes) + 2, max(len(r["completion"]) for r in rows) + 1

        def right(values, width):
            return [0] * (width - len(values)) + list(values)

        def stacked(key, width=longest, rows=rows):
            return torch.tensor([right(row[key], width) for row in rows])

        ones = [[1] * len(r["completion"]) for r in rows]
        advantages = [[r["advantage"]] * len(r["completion"]) for r in rows]
        content = {
            "sequences": torch.tensor([right(r["prompt"] + r["completion"], total) for r in rows]),
            "attention_mask": torch.tensor([right([1] * n, total) for n in sizes]),
            "response_mask": torch.tensor([right(one, longest) for one in ones]),
            "loss_mask": torch.tensor([right(one, longest) for one in ones]).float(),
            "rollout_logprobs": stacked("logp_sampler"),
            "action_log_probs": stacked("logp_old"),
            "base_action_log_probs": stacked("logp_ref"),
            "advantages": torch.tensor([right(values, longest) for values in advantages]),
        }
        save(content, folder / f"dumped_data/global_step_{batch.step}_training_input.pt")
    return folder


WRITERS = {"slime": write_slime, "miles": write_miles, "SkyRL": write_skyrl}


def dump_of(folder):
    return open_torch_dump(find_torch_dump(folder))


def judge(folder):
    return diagnose_dump(dump_of(folder), None, no_progress)


@pytest.mark.parametrize("name", WRITERS)
def test_every_value_is_at_its_token(tmp_path, name):
    folder = WRITERS[name](tmp_path, steps=2)
    assert find_torch_dump(folder).trainer == name
    for record, batch in zip(dump_of(folder).read_records(), batches(steps=2), strict=True):
        order = sorted(range(len(batch.rows)), key=lambda i: i % 2) if name == "miles" else None
        rows = [batch.rows[i] for i in order] if order else batch.rows
        assert record.token_ids.tolist() == [t for row in rows for t in row["completion"]]
        assert record.prompt_ids.tolist() == [t for row in rows for t in row["prompt"]]
        assert record.loss_mask.all()
        for column in ("logp_sampler", "logp_old", "logp_ref"):
            wanted = [value for row in rows for value in row[column]]
            assert getattr(record, column) == pytest.approx(wanted, abs=1e-6)
        assert record.advantage == pytest.approx([row["advantage"] for row in rows], abs=1e-6)
        groups = [row["prompt_idx"] for row in rows]
        assert len({(a, b) for a, b in zip(record.group, groups, strict=True)}) == len(set(groups))
        if name != "SkyRL":
            assert record.reward == pytest.approx([row["reward"] for row in rows])
            assert set(record.finish_reason) == {"length"}


@pytest.mark.parametrize("name", WRITERS)
def test_healthy_is_quiet_and_a_shift_is_named(tmp_path, name):
    healthy = judge(WRITERS[name](tmp_path / "well"))
    assert not healthy.sick
    assert healthy.records.missing
    assert judge(WRITERS[name](tmp_path / "sick", shift=1)).records.cause == "misaligned-logp"


@pytest.mark.parametrize("name", ["slime", "miles"])
def test_a_temperature_on_one_side_is_named(tmp_path, name):
    folder = WRITERS[name](tmp_path, temperature=0.6)
    assert judge(folder).records.cause == "temperature-on-one-side"


def test_files_of_slimes_own_writer_are_well():
    result = judge(OWN)
    assert not result.sick
    assert result.contents.steps == [3]
    assert result.contents.facts["advantage"] == "group_std"
    assert {"logp_sampler", "logp_old", "logp_ref", "entropy"} <= set(result.contents.names)


def test_a_rollout_without_training_data_has_one_side(tmp_path):
    write_slime(tmp_path, trained=False, steps=1)
    record = next(dump_of(tmp_path).read_records())
    assert record.logp_old is None
    assert record.logp_sampler is not None
    assert len(set(record.group.tolist())) == 6


def test_parts_of_context_parallelism_are_left_out(tmp_path):
    write_miles(tmp_path, steps=1, cp_size=2)
    record = next(dump_of(tmp_path).read_records())
    assert record.logp_old is None
    assert record.reward is not None


def test_a_converted_dump_has_a_report(tmp_path):
    convert_run(dump_of(write_slime(tmp_path / "dump")), None, tmp_path / "run", no_progress)
    page = read_run_report(tmp_path / "run")
    assert page.curves.series("kl")[0] == [1, 2, 3, 4]
    assert page.heat[0].completions


class Command:
    """A value whose unpickling would execute a command."""

    def __reduce__(self):
        return (print, ("executed",))


def test_nothing_is_executed(tmp_path, capsys):
    path = tmp_path / "train_data" / "0.pt"
    save({"samples": [{"tokens": Command()}]}, path)
    with pytest.raises(EvidenceError, match="holds more than tensors, numbers and texts"):
        list(dump_of(tmp_path).read_records())
    path.write_bytes(pickle.dumps(Command()))
    with pytest.raises(EvidenceError, match="is not a file of torch"):
        list(dump_of(tmp_path).read_records())
    assert "executed" not in capsys.readouterr().out


def test_numpy_values_are_refused_with_advice(tmp_path):
    save({"samples": [{"reward": np.float64(1.0)}]}, tmp_path / "train_data" / "0.pt")
    with pytest.raises(EvidenceError, match="NumPy values in `reward`"):
        list(dump_of(tmp_path).read_records())


def test_an_archive_that_expands_is_refused(tmp_path):
    path = tmp_path / "train_data" / "0.pt"
    save({"samples": [{"tokens": torch.zeros(1 << 20)}]}, path)
    packed = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    path.write_bytes(packed.getvalue())
    with pytest.raises(EvidenceError, match="which torch does not write"):
        list(dump_of(tmp_path).read_records())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("tokens", value) for value in (torch.ones(2, 2), torch.tensor([0.5]), "x", None)],
        ("tokens", torch.zeros(1).expand(1 << 21)),
        ("tokens", torch.zeros(3).to_sparse()),
        *[("response_lengths", value) for value in (-1, 1e9, "x", None, torch.ones(2))],
        *[("log_probs", value) for value in (torch.ones(3), [1, "x"], {})],
        ("loss_masks", torch.ones(3)),
        ("truncated", "no"),
    ],
)
def test_a_wrong_field_is_a_sentence_with_its_place(tmp_path, field, value):
    write_slime(tmp_path, steps=1)
    path = tmp_path / "train_data" / "0.pt"
    content = torch.load(path, weights_only=True)
    content["samples"][3][field] = value
    torch.save(content, path)
    with pytest.raises(EvidenceError, match=r"0\.pt, samples\[3\]: "):
        list(dump_of(tmp_path).read_records())


@pytest.mark.parametrize("field", ["sequences", "response_mask", "action_log_probs"])
@pytest.mark.parametrize("value", [torch.ones(3), torch.ones(2, 2), "x"])
def test_a_wrong_matrix_of_skyrl_is_refused(tmp_path, field, value):
    write_skyrl(tmp_path, steps=1)
    path = next(tmp_path.rglob("*.pt"))
    content = torch.load(path, weights_only=True)
    torch.save({**content, field: value}, path)
    with pytest.raises(EvidenceError, match=r"_training_input\.pt: "):
        list(dump_of(tmp_path).read_records())


def test_the_command_for_skyrl_writes_what_is_read(tmp_path, monkeypatch):
    write_skyrl(tmp_path, steps=1)
    path = next(tmp_path.rglob("*.pt"))
    content = torch.load(path, weights_only=True)
    path.with_suffix(".pkl").write_bytes(pickle.dumps({**content, "values": None}))
    path.unlink()
    with pytest.raises(EvidenceError, match="is a pickle of SkyRL"):
        find_torch_dump(tmp_path)
    monkeypatch.chdir(path.parent)
    program = SKYRL_COMMAND.removeprefix('python -c "').removesuffix('"')
    exec(compile(program, "command", "exec"), {})  # noqa: S102 - what the message says to run
    assert next(dump_of(tmp_path).read_records()).logp_old is not None


@pytest.mark.parametrize("name", WRITERS)
def test_damaged_files_are_read_or_refused(tmp_path, name):
    damage_and_read(WRITERS[name], tmp_path, num=60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", WRITERS)
def test_2000_damaged_files_are_read_or_refused(tmp_path, name):
    damage_and_read(WRITERS[name], tmp_path, num=2000)


def refusal(folder):
    """Return the message for a folder; "" if it was read."""
    try:
        judge(folder)
    except EvidenceError as error:
        return str(error)
    return ""


def damage_and_read(write, folder, *, num):
    write(folder, steps=1, length=8)
    files = sorted(folder.rglob("*.pt"))
    contents = {path: path.read_bytes() for path in files}
    chance = random.Random(0)  # noqa: S311 - not a secret
    refused = 0
    for _ in range(num):
        path = chance.choice(files)
        data = bytearray(contents[path])
        for _ in range(chance.choice((1, 1, 3, 20))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.2:
            del data[chance.randrange(len(data)) :]
        path.write_bytes(data)
        start = time.process_time()
        refused += str(folder) in refusal(folder)
        assert time.process_time() - start < 2.0
        path.write_bytes(contents[path])
    assert 0 < refused < num
