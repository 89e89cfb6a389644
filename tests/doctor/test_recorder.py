"""`klinic.Recorder`: any loop's batches become records, joined to their samples by content."""

import io

import numpy as np
import pytest
from rich.console import Console

from klinic import Recorder
from klinic.errors import ConfigError, EvidenceError
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.evidence.record import EmittedBy
from klinic.evidence.run_facts import EVENTS, METRICS, read_run_facts

PROMPTS = [[1], [1], [2], [2]]
COMPLETIONS = [[5, 6], [5], [7, 8, 9], [6]]
LOGP = [[-0.1, -0.2], [-0.3], [-0.4, -0.5, -0.6], [-0.7]]
GROUP = [0, 0, 1, 1]
REWARD = [1.0, 0.0, 0.5, 0.0]
ADVANTAGE = [0.5, -0.5, 0.25, -0.25]


def make(folder, **settings):
    console = Console(file=io.StringIO())
    return Recorder(folder, advantage="group_mean", console=console, **settings)


def samples(recorder, **changes):
    given = {"prompt_ids": PROMPTS, "completion_ids": COMPLETIONS, "logp_sampler": LOGP}
    recorder.record_samples(**{**given, "reward": REWARD, "group": GROUP, **changes})


def step(recorder, **changes):
    given = {"prompt_ids": PROMPTS, "completion_ids": COMPLETIONS, "logp_old": LOGP}
    recorder.record_step(**{**given, "advantage": ADVANTAGE, **changes})


def only_record(folder):
    return store.read_record(folder, 1)


def test_a_step_becomes_a_record_with_what_was_sampled(tmp_path):
    with make(tmp_path / "run", eos_ids=[6], seed=3, temperature=1.0) as recorder:
        samples(recorder)
        step(recorder, kl_coef=0.1, grad_norm=2.0, process=[0, 0, 1, 1])
    record = only_record(tmp_path / "run")
    assert record.token_ids.tolist() == [5, 6, 5, 7, 8, 9, 6]
    np.testing.assert_array_equal(record.logp_sampler, np.concatenate(LOGP).astype(np.float32))
    assert record.reward.tolist() == REWARD
    assert record.finish_reason.tolist() == ["stop", "length", "length", "stop"]
    assert record.process.tolist() == [0, 0, 1, 1]
    assert record.prompt_ids_match.all()
    assert record.round_trip.all()
    assert (record.emitted_by == EmittedBy.POLICY).all()
    assert record.facts["num_moved_rows"] == record.facts["num_changed_rows"] == 0
    assert record.facts["grad_norm"] == 2.0
    facts = read_run_facts(tmp_path / "run")
    assert (facts["seed"], facts["sampling"]["temperature"]) == (3, 1.0)
    (line,) = Journal(tmp_path / "run" / METRICS).entries()
    assert (line["reward"], line["kl_coef"]) == (0.375, 0.1)
    assert [e["event"] for e in Journal(tmp_path / "run" / EVENTS).entries()] == ["ended"]


def test_rows_that_moved_keep_their_samples(tmp_path):
    order = [2, 0, 3, 1]
    moved = {
        "prompt_ids": [PROMPTS[n] for n in order],
        "completion_ids": [COMPLETIONS[n] for n in order],
        "logp_old": [LOGP[n] for n in order],
    }
    with make(tmp_path / "run", doctor="none") as recorder:
        samples(recorder)
        step(recorder, **moved)
    record = only_record(tmp_path / "run")
    assert record.reward.tolist() == [REWARD[n] for n in order]
    np.testing.assert_array_equal(record.logp_sampler, record.logp_old)
    assert record.facts["num_moved_rows"] == 4


def test_padded_arrays_are_the_same_as_lists(tmp_path):
    mask = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 0]])
    ids, logp = np.zeros(mask.shape, int), np.zeros(mask.shape)
    ids[mask == 1], logp[mask == 1] = np.concatenate(COMPLETIONS), np.concatenate(LOGP)
    padded = {"prompt_ids": np.array(PROMPTS), "completion_ids": ids, "completion_mask": mask}
    for name, changes in (("lists", {}), ("padded", padded)):
        with make(tmp_path / name, doctor="none") as recorder:
            samples(recorder, **changes, **({"logp_sampler": logp} if changes else {}))
            step(recorder, **changes, **({"logp_old": logp} if changes else {}))
    one, other = only_record(tmp_path / "lists"), only_record(tmp_path / "padded")
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.logp_sampler.tolist() == other.logp_sampler.tolist()


def test_tokens_behind_the_sample_are_not_the_policys(tmp_path):
    longer = [[*ids, 3] for ids in COMPLETIONS]
    with make(tmp_path / "run", doctor="none") as recorder:
        samples(recorder)
        step(recorder, completion_ids=longer, logp_old=[[*row, -1.0] for row in LOGP])
    record = only_record(tmp_path / "run")
    ends = record.row_offsets[1:] - 1
    assert (record.emitted_by[ends] == EmittedBy.TOOL).all()
    assert (record.emitted_by == EmittedBy.TOOL).sum() == 4
    assert np.isnan(record.logp_sampler[ends]).all()
    assert record.reward.tolist() == REWARD


def test_a_second_turn_after_another_rendering_is_the_policys_and_no_match(tmp_path):
    """The sampler saw `4 4` between the turns, the learner scores `3 3`."""
    turns = [[*ids, 3, 3, 9, 2] for ids in COMPLETIONS]
    contexts = [[*p, *ids, 4, 4] for p, ids in zip(PROMPTS, COMPLETIONS, strict=True)]
    with make(tmp_path / "run", doctor="none") as recorder:
        samples(recorder, reward=None)
        answers = {"prompt_ids": contexts, "completion_ids": [[9, 2]] * 4}
        samples(recorder, **answers, logp_sampler=[[-1.0, -2.0]] * 4, reward=None)
        step(recorder, completion_ids=turns, logp_old=[[-1.0] * len(ids) for ids in turns])
    record = only_record(tmp_path / "run")
    assert not record.prompt_ids_match.any()
    by_row = np.split(record.emitted_by, record.row_offsets[1:-1])
    policy, tool = int(EmittedBy.POLICY), int(EmittedBy.TOOL)
    for row, ids in zip(by_row, COMPLETIONS, strict=True):
        assert row.tolist() == [*[policy] * len(ids), tool, tool, policy, policy]


def test_without_samples_nothing_is_claimed_about_them(tmp_path):
    with make(tmp_path / "run", doctor="none") as recorder:
        step(recorder, group=GROUP, advantage=[[0.5, 0.4], [-0.5], [0.1, 0.2, 0.3], [0.0]])
    record = only_record(tmp_path / "run")
    assert record.emitted_by is None
    assert record.prompt_ids_match is None
    assert record.advantage is None
    np.testing.assert_allclose(record.token_advantage, [0.5, 0.4, -0.5, 0.1, 0.2, 0.3, 0.0])
    assert "num_moved_rows" not in record.facts


def test_one_advantage_at_all_trained_tokens_is_that_of_the_row(tmp_path):
    mask = [[1, 1], [1], [0, 1, 1], [1]]
    tokens = [[0.5, 0.5], [-0.5], [0.0, 0.2, 0.2], [-0.2]]
    with make(tmp_path / "run", doctor="none") as recorder:
        step(recorder, group=GROUP, advantage=tokens, loss_mask=mask)
    record = only_record(tmp_path / "run")
    np.testing.assert_allclose(record.advantage, [0.5, -0.5, 0.2, -0.2])
    assert record.token_advantage is not None


def test_divisors_of_the_loss_and_weights_of_ranks_are_kept(tmp_path):
    divided = {"loss_denominator": [4, 4, 8, 8], "process": [0, 0, 1, 1]}
    with make(tmp_path / "run", doctor="none", aggregation="token_mean") as recorder:
        step(recorder, group=GROUP, rank_weights=["a", "b"], **divided)
        step(recorder, group=GROUP, loss_denominator=7.0)
    one, two = (store.read_record(tmp_path / "run", number) for number in (1, 2))
    assert one.loss_denominator.tolist() == [4, 4, 8, 8]
    assert one.facts["num_rank_weights"] == 2
    assert (two.loss_denominator, two.facts["loss_denominator"]) == (None, 7.0)


def test_a_shared_forward_pass_serves_the_old_log_probs_too(tmp_path):
    for name, shared in (("shared", True), ("unknown", None)):
        with make(tmp_path / name, doctor="none", shared_forward=shared) as recorder:
            step(recorder, group=GROUP, logp=LOGP, logp_old=None, logp_ref=LOGP)
    record = only_record(tmp_path / "shared")
    np.testing.assert_array_equal(record.logp_old, record.logp)
    assert only_record(tmp_path / "unknown").logp_old is None
    (line,) = Journal(tmp_path / "shared" / METRICS).entries()
    assert line["kl"] == 0


def test_samples_of_an_older_generation_carry_their_version(tmp_path):
    with make(tmp_path / "run", doctor="none") as recorder:
        samples(recorder)
        step(recorder)
        step(recorder)
    assert store.read_record(tmp_path / "run", 2).weight_version.tolist() == [0] * 7
    assert store.read_record(tmp_path / "run", 2).facts["learner_version"] == 1


@pytest.mark.parametrize("versions", [(100, 101), (0, 10)], ids=["resumed", "every tenth step"])
def test_samples_have_the_learners_version_unless_another_is_passed(tmp_path, versions):
    with make(tmp_path / "run", doctor="none") as recorder:
        samples(recorder)
        step(recorder, learner_version=versions[0])
        samples(recorder)
        step(recorder, learner_version=versions[1])
        samples(recorder, weight_version=7)
        step(recorder, learner_version=versions[1] + 1)
    records = [store.read_record(tmp_path / "run", number) for number in (1, 2, 3)]
    assert [r.weight_version.tolist() for r in records] == [[v] * 7 for v in (*versions, 7)]


def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not empty"):
        make(tmp_path)


def test_a_loop_may_number_its_steps_itself(tmp_path):
    with make(
        tmp_path / "run", doctor="none", trainer="verl", versions={"verl": "0.9"}
    ) as recorder:
        samples(recorder)
        step(recorder, step=101, kl_logged=0.0)
        samples(recorder)
        step(recorder)
        step(recorder, step=105)
        with pytest.raises(EvidenceError, match="`step` is 105 and the last recorded step was 105"):
            step(recorder, step=105)
    first = store.read_record(tmp_path / "run", 101)
    assert first.facts["learner_version"] == 100
    assert first.facts["kl_logged"] == 0.0
    assert set(first.weight_version.tolist()) == {100}  # the samples were those of its weights
    second = store.read_record(tmp_path / "run", 102)
    assert set(second.weight_version.tolist()) == {second.facts["learner_version"]} == {101}
    assert store.read_record(tmp_path / "run", 105).facts["learner_version"] == 104
    facts = read_run_facts(tmp_path / "run")
    assert (facts["trainer"], facts["versions"]) == ("verl", {"verl": "0.9"})
