"""Dumps of eight trainers, as records that the checks of tokens judge."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from foreign_dumps import (
    GROUP,
    PROMPTS,
    TEXTS,
    WRITERS,
    batches,
    write_lines,
    write_nemo_rl,
    write_open_instruct,
    write_prime_rl,
    write_traces,
    write_trl,
)
from foreign_logs import healthy, trl_entries, write_trainer_state

from klinic.doctor.dump_diagnosis import diagnose_dump
from klinic.errors import EvidenceError
from klinic.evidence.readers.dumps.find import find_dumps
from klinic.evidence.readers.find import read_log
from klinic.evidence.record import EmittedBy

OWN = Path(__file__).parent / "own_writers"
LOG_PROBS = [name for name in WRITERS if name not in TEXTS and "open-instruct" not in name]


def first_dump(folder):
    return find_dumps(folder)[0].open()


def records_of(folder):
    return list(first_dump(folder).read_records())


def judge(folder, log=None):
    return diagnose_dump(first_dump(folder), log, lambda done, total: None)


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_has_the_rewards_and_groups_of_its_steps(tmp_path, name):
    folder = WRITERS[name](tmp_path)
    assert first_dump(folder).format == name
    records = records_of(folder)
    assert [record.step for record in records] == [1, 2, 3, 4]
    for record, batch in zip(records, batches(), strict=True):
        order = sorted(range(record.num_rows), key=lambda row: record.group[row])
        assert record.reward.tolist() == pytest.approx([row["reward"] for row in batch.rows])
        assert [int(record.group[row]) for row in order] == [
            n for n in range(PROMPTS) for _ in range(GROUP)
        ]
        if record.advantage is not None:
            expected = [row["advantage"] for row in batch.rows]
            assert record.advantage.tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", LOG_PROBS)
def test_log_probs_belong_to_their_tokens(tmp_path, name):
    folder = WRITERS[name](tmp_path)
    for record, batch in zip(records_of(folder), batches(), strict=True):
        ids = [token for row in batch.rows for token in row["completion"]]
        assert record.token_ids.tolist() == ids
        assert record.loss_mask.all()
        prompts = [token for row in batch.rows for token in row["prompt"]]
        assert record.prompt_ids.tolist() == prompts
        old = record.logp if record.logp_old is None else record.logp_old
        for column, key in ((record.logp_sampler, "logp_sampler"), (old, "logp_old")):
            assert column == pytest.approx(
                [value for row in batch.rows for value in row[key]], abs=1e-4
            )


@pytest.mark.parametrize("name", WRITERS)
def test_a_healthy_dump_is_quiet_and_says_what_was_decided(tmp_path, name):
    result = judge(WRITERS[name](tmp_path))
    assert not result.sick, [h.check.name for h in result.records.hypotheses if h.num_failed]
    assert 0 < result.num_decided < len(result.records.hypotheses)
    assert result.records.missing


@pytest.mark.parametrize("name", LOG_PROBS)
def test_a_shifted_sampler_is_named(tmp_path, name):
    result = judge(WRITERS[name](tmp_path, shift=1))
    assert result.records.cause == "misaligned-logp"


@pytest.mark.parametrize("name", [n for n in LOG_PROBS if "NeMo" not in n])
def test_a_temperature_on_one_side_is_named(tmp_path, name):
    result = judge(WRITERS[name](tmp_path, temperature=0.6))
    assert result.records.cause == "temperature-on-one-side"


def test_without_entropy_a_temperature_is_a_gap_with_rivals(tmp_path):
    result = judge(write_nemo_rl(tmp_path, temperature=0.6))
    assert result.sick
    names = {result.records.cause, *(rival.name for rival in result.records.rivals)}
    assert "temperature-on-one-side" in names


@pytest.mark.parametrize("name", ["completions of TRL", "traces of open-instruct"])
def test_advantages_of_one_group_too_many_are_named(tmp_path, name):
    def some(row, random):
        return float(random.random())

    result = judge(WRITERS[name](tmp_path, reward=some))
    assert result.contents.facts["advantage"] == "group_std"
    assert not result.sick


def test_rewards_that_are_all_equal_fail(tmp_path):
    result = judge(write_trl(tmp_path, reward=lambda row, random: 0.0))
    failed = [h.check.name for h in result.records.hypotheses if h.num_failed]
    assert failed == ["equal-rewards"]


def test_chats_are_compared_as_texts(tmp_path):
    plain, chats = write_trl(tmp_path / "plain"), write_trl(tmp_path / "chats", chats=True)
    for one, other in zip(records_of(plain), records_of(chats), strict=True):
        assert one.reward.tolist() == other.reward.tolist()
        assert one.group.tolist() == other.group.tolist()


def test_texts_say_that_they_are_texts(tmp_path):
    for name in TEXTS:
        assert first_dump(WRITERS[name](tmp_path / name)).has_texts_only
    record = records_of(tmp_path / TEXTS[0])[0]
    row = next(batches()).rows[0]
    ends = slice(record.row_offsets[0], record.row_offsets[1])
    written = "".join(map(chr, record.token_ids[ends]))
    assert written == " ".join(map(str, row["completion"]))


def rewritten(path, change):
    """Rewrite each line of a file by a function of its entry and its number."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    write_lines(path, [change(line, number) for number, line in enumerate(lines)])


def test_under_dynamic_sampling_the_rewards_are_those_of_the_kept_samples(tmp_path):
    write_nemo_rl(tmp_path, steps=1)
    path = tmp_path / "train_data_step1.jsonl"
    # NeMo-RL logs the rewards of all samples beside the columns of those that were kept
    rewritten(
        path, lambda line, n: {**line, "filtered_rewards": line["rewards"], "rewards": [n / 7]}
    )
    surplus = {key: [] for key in json.loads(path.read_text().splitlines()[0])}
    with path.open("a") as file:
        file.write(json.dumps({**surplus, "rewards": [0.0], "idx": 24}) + "\n")
    record = records_of(tmp_path)[0]
    expected = [row["reward"] for row in next(batches()).rows]
    assert record.reward.tolist() == pytest.approx(expected)
    assert not judge(tmp_path).sick


def test_texts_of_a_distillation_by_nemo_rl_are_no_dump(tmp_path):
    write_lines(tmp_path / "train_data_step1.jsonl", [{"content": ["x"], "input_lengths": [3]}])
    write_trainer_state(tmp_path / "trainer_state.json", trl_entries(healthy(4)))
    assert find_dumps(tmp_path) == []
    assert read_log(tmp_path).steps == (1, 2, 3, 4)


@pytest.mark.parametrize("name", ["traces of verifiers", "completions of ms-swift", *TEXTS[2:]])
def test_a_dump_whose_first_line_is_long_is_found(tmp_path, name):
    folder = WRITERS[name](tmp_path, steps=1)
    path = next(p for p in folder.rglob("*.jsonl"))
    size = 18 if "ms-swift" in name else 2
    rewritten(path, lambda line, n: line if n else {**line, "info": "x" * (size << 20)})
    assert first_dump(folder).format == name
    assert records_of(folder)[0].num_rows == PROMPTS * GROUP


def test_the_folder_of_an_evaluation_by_verifiers_is_enough(tmp_path):
    write_traces(tmp_path / "run", steps=1)
    shutil.copy(next((tmp_path / "run").rglob("traces.jsonl")), tmp_path)
    shutil.rmtree(tmp_path / "run")
    assert records_of(tmp_path)[0].num_rows == PROMPTS * GROUP


def test_traces_without_tokens_are_refused_with_the_reason(tmp_path):
    write_traces(tmp_path, steps=1)
    path = next(tmp_path.rglob("traces.jsonl"))

    def without_tokens(line, number):
        for node in line["traces"][0]["nodes"]:
            node.update(token_ids=[], mask=[], logprobs=[])
            for key in ("trainer_logprobs", "reference_logprobs", "entropies", "advantages"):
                node.pop(key, None)
        return line

    rewritten(path, without_tokens)
    with pytest.raises(EvidenceError, match=r"traces\.jsonl: .* no token ids"):
        records_of(tmp_path)


def test_the_log_folder_of_areal_is_enough(tmp_path):
    WRITERS["trajectories of AReaL"](tmp_path / "trial" / "rollout")
    (tmp_path / "trial" / "main.log").write_text("step 1 | loss 0.1 | reward 0.5\n")
    assert first_dump(tmp_path / "trial").format == "trajectories of AReaL"


def test_scalars_are_joined_by_step(tmp_path):
    write_trl(tmp_path)
    entries = [{**entry, "grad_norm": 0.0} for entry in trl_entries(healthy(4))]
    write_trainer_state(tmp_path / "trainer_state.json", entries)
    result = judge(tmp_path, read_log(tmp_path))
    assert result.contents.joined == ["grad_norm", "learning_rate"]
    failed = [h.check.name for h in result.records.hypotheses if h.num_failed]
    assert failed == ["policy-does-not-move"]
    assert not judge(tmp_path).records.sick


def test_a_mean_over_ten_steps_is_joined_to_none(tmp_path):
    write_trl(tmp_path, steps=20)
    entries = trl_entries(healthy(20), every=10)
    write_trainer_state(tmp_path / "trainer_state.json", entries)
    assert judge(tmp_path, read_log(tmp_path)).contents.joined == []


def test_a_dump_is_no_log_of_metrics(tmp_path):
    write_nemo_rl(tmp_path, steps=1)
    with pytest.raises(EvidenceError, match="has no records"):
        read_log(tmp_path)


def test_one_file_of_a_dump_is_enough(tmp_path):
    write_nemo_rl(tmp_path / "nemo")
    assert len(records_of(tmp_path / "nemo" / "train_data_step3.jsonl")) == 1
    write_trl(tmp_path / "trl")
    file = tmp_path / "trl" / "completions" / "completions_00002.parquet"
    assert [record.step for record in records_of(file)] == [2]


def test_prime_rls_export_gets_rewards_and_sources_from_its_traces(tmp_path):
    record = records_of(write_prime_rl(tmp_path, steps=1))[0]
    assert set(record.emitted_by.tolist()) == {int(EmittedBy.POLICY)}
    shutil.rmtree(tmp_path / "rollouts")
    bare = records_of(tmp_path)[0]
    assert bare.reward is None
    assert bare.emitted_by is None


def test_a_trained_tool_token_is_a_wrong_mask(tmp_path):
    write_prime_rl(tmp_path, steps=1)
    path = tmp_path / "rollouts" / "step_1" / "train" / "effective" / "traces.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        inserted = line["traces"][0]["nodes"][1]
        inserted["message"]["role"] = "tool"
        inserted["mask"] = [False] * len(inserted["mask"])
        for key in ("logprobs", "trainer_logprobs", "reference_logprobs", "entropies"):
            inserted[key] = []
        inserted["advantages"] = []
    # the tool's tokens move into the prompt of the trace, and its ids stay the same
    write_lines(path, lines)
    record = records_of(tmp_path)[0]
    assert record.reward is not None


def test_branches_of_a_trace_are_rows(tmp_path):
    write_traces(tmp_path, steps=1)
    path = next(tmp_path.rglob("traces.jsonl"))
    line = json.loads(path.read_text().splitlines()[0])
    nodes = line["traces"][0]["nodes"]
    line["traces"][0]["nodes"] = [*nodes, {**nodes[2], "parent": 0}]
    write_lines(path, [line])
    record = records_of(tmp_path)[0]
    assert record.num_rows == 2
    assert np.diff(record.row_offsets).tolist() == [48, 24]


@pytest.mark.parametrize("parent", [5, -1, "x"])
def test_a_loop_of_nodes_is_refused(tmp_path, parent):
    write_traces(tmp_path, steps=1)
    path = next(tmp_path.rglob("traces.jsonl"))
    line = json.loads(path.read_text().splitlines()[0])
    line["traces"][0]["nodes"][1]["parent"] = parent
    write_lines(path, [line])
    with pytest.raises(EvidenceError, match="parent"):
        records_of(tmp_path)


def test_open_instructs_groups_are_prompts_if_positions_are_not(tmp_path):
    folder = write_open_instruct(tmp_path, steps=1)
    path = folder / "run_rollouts_000000.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (folder / "run_rollouts_000001.jsonl").unlink()
    order = [*lines[1::2], *lines[::2]]
    write_lines(path, [{**line, "prompt_idx": n // GROUP} for n, line in enumerate(order)])
    record = records_of(folder)[0]
    assert len(set(record.group.tolist())) == PROMPTS
    prompts = record.prompt_ids.reshape(-1, 2)[:, 0]
    assert len({(g, p) for g, p in zip(record.group, prompts, strict=True)}) == PROMPTS


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("trl", {"reward", "advantage"}),
        ("nemo_rl", {"reward", "advantage", "logp_sampler", "logp_old"}),
        ("open_instruct", {"reward", "advantage", "logp_sampler", "finish_reason"}),
        ("prime_rl", {"reward", "advantage", "logp_sampler", "entropy", "emitted_by"}),
    ],
)
def test_files_of_the_trainers_own_writers_are_read_and_well(name, has):
    result = judge(OWN / name)
    assert not result.sick
    assert has <= set(result.contents.names)
    assert result.contents.facts["advantage"] == "group_std"


def test_the_traces_of_verifiers_own_writer_have_all_four_log_probs():
    path = next((OWN / "prime_rl" / "rollouts").rglob("traces.jsonl"))
    record = records_of(path)[0]
    assert record.step == 2
    fields = (record.logp_sampler, record.logp_old, record.logp_ref, record.entropy)
    assert all(np.isfinite(column).all() for column in fields)
    assert np.abs(record.logp_sampler - record.logp_old).mean() < 0.02


def test_what_trl_printed_has_the_steps_of_its_state():
    printed, state = (read_log(OWN / "trl" / name) for name in ("train.log", "trainer_state.json"))
    assert printed.steps == state.steps == (1, 2, 3, 4)
    assert printed.column("kl") == pytest.approx(state.column("kl"), rel=1e-3)
    assert printed.trainer.name == "TRL"


@pytest.mark.parametrize(("size", "limit"), [(100_000, "64 times"), (3_000, "characters, and")])
def test_a_text_in_every_row_is_refused_before_it_is_expanded(tmp_path, size, limit):
    num = 100_000
    column = pa.DictionaryArray.from_arrays(np.zeros(num, np.int32), ["x" * size])
    filler = np.random.default_rng(0).normal(size=num)  # which does not compress
    advantage = np.zeros(num) if size == 100_000 else filler
    path = tmp_path / "completions" / "completions_00001.parquet"
    path.parent.mkdir()
    table = {"prompt": column, "completion": column, "advantage": advantage}
    pq.write_table(pa.table(table), path)
    assert path.stat().st_size < 2**21
    with pytest.raises(EvidenceError, match=limit):
        records_of(tmp_path)


def test_texts_of_trl_that_are_not_utf_8_are_a_sentence(tmp_path):
    data = b"an answer\xee"
    offsets = pa.py_buffer(np.array([0, len(data)], np.int32))
    column = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(data)])
    path = tmp_path / "completions" / "completions_00001.parquet"
    path.parent.mkdir()
    table = {"prompt": ["x"], "completion": column, "advantage": [0.0]}
    pq.write_table(pa.table(table), path)
    with pytest.raises(EvidenceError, match=r"completions_00001\.parquet"):
        records_of(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("token_ids", value) for value in ([1.5], ["x"], None, [2**40], {"a": 1})],
        *[("input_lengths", value) for value in (-1, "many", None)],
        *[("generation_logprobs", value) for value in ([[0.0]], ["x"], 3)],
        *[("token_loss_mask", value) for value in ([[1]], None)],
        *[("rewards", value) for value in ("much", [[1, 2]])],
    ],
)
def test_a_wrong_field_is_a_sentence_with_its_place(tmp_path, field, value):
    write_nemo_rl(tmp_path, steps=1)
    path = tmp_path / "train_data_step1.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[3][field] = value
    write_lines(path, lines)
    with pytest.raises(EvidenceError, match=r"train_data_step1\.jsonl, line 4: "):
        records_of(tmp_path)
