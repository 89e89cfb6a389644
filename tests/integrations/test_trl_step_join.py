"""What the processes of a TRL run have in common: groups, probe results, layouts."""

from types import SimpleNamespace

import numpy as np
import pytest

from klinic.errors import ConfigError
from klinic.evidence.processes import SINGLE_PROCESS
from klinic.evidence.record import StepRecord
from klinic.integrations.trl.rollouts import find_groups
from klinic.integrations.trl.sharding import reject_unsupported_layout
from klinic.integrations.trl.step_join import join_step, worst_results
from process_threads import run_in_processes

PROMPTS = {0: ["a"] * 4 + ["b"] * 2, 1: ["b"] * 2 + ["c"] * 4}


def test_a_group_that_spans_ranks_is_one():
    first, second = run_in_processes(
        2, lambda p: find_groups(PROMPTS[p.rank], PROMPTS[p.rank], 4, p)
    )
    assert first.group.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert (first.own, second.own) == (slice(0, 6), slice(6, 12))
    assert second.sample[second.own].tolist() == [2, 3, 0, 1, 2, 3]
    assert first.num_split == 0


def test_a_group_whose_members_received_different_prompts_is_split():
    found = find_groups(["a"] * 4 + ["b"] * 4, [*"wxyz", *"bbbb"], 4, SINGLE_PROCESS)
    assert found.group.tolist() == [0] * 4 + [1] * 4
    assert found.num_split == 1


def test_the_result_farthest_from_the_expected_one_counts():
    fine = {"ratio": 1.0, "cosine": 1.0}
    ranks = [
        {"kl_gradient": {"ratio": None, "cosine": None}, "micro_batches": fine},
        {"kl_gradient": {"ratio": -1.0, "cosine": -1.0}, "micro_batches": {**fine, "ratio": 1.01}},
    ]
    worst = worst_results(ranks)
    assert worst["kl_gradient"] == {"ratio": -1.0, "cosine": -1.0, "process": 1}
    assert worst["micro_batches"]["process"] == 1
    assert worst_results(ranks[:1]) == ranks[0]


@pytest.mark.parametrize(("weights", "expected"), [("aa", 1), ("ab", 2)])
def test_weights_of_processes_are_counted(weights, expected):
    def body(process):
        record = StepRecord(
            step=1,
            group=np.array([process.rank]),
            row_offsets=np.array([0, 1]),
            token_ids=np.array([1]),
            loss_mask=np.array([True]),
            facts={"weights_published": weights[process.rank]},
        )
        return join_step(process, record, parsed=(process.rank, 1))

    joined, nothing = run_in_processes(2, body)
    assert nothing is None
    assert joined.record.facts["num_rank_weights"] == expected
    assert (joined.num_parsed, joined.num_to_parse) == (1, 2)


def trainer_of(**changes):
    given = {
        "accelerator": SimpleNamespace(is_fsdp2=False, parallelism_config=None),
        "is_deepspeed_enabled": False,
        "is_fsdp_enabled": False,
        "beta": 0.0,
        "model": SimpleNamespace(),
    }
    return SimpleNamespace(**{**given, **changes})


def test_layouts_that_cannot_be_read_are_refused():
    reject_unsupported_layout(trainer_of(), monitors=True)
    sharded = SimpleNamespace(is_fsdp2=True, parallelism_config=None)
    reject_unsupported_layout(trainer_of(accelerator=sharded), monitors=False)
    parallel = SimpleNamespace(is_fsdp2=True, parallelism_config=SimpleNamespace(tp_size=2))
    for changes, words in (
        ({"is_fsdp_enabled": True}, "fsdp_version: 2"),
        ({"accelerator": parallel}, "uses tp of"),
        ({"accelerator": sharded}, "monitor_kl_every"),
    ):
        with pytest.raises(ConfigError, match=words):
            reject_unsupported_layout(trainer_of(**changes), monitors=True)


def deepspeed_trainer(stage, **changes):
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage))
    accelerator = SimpleNamespace(is_fsdp2=False, parallelism_config=None, state=state)
    return trainer_of(is_deepspeed_enabled=True, accelerator=accelerator, **changes)


def test_what_deepspeed_cannot_do_is_refused():
    reject_unsupported_layout(deepspeed_trainer(2), monitors=True)
    reject_unsupported_layout(deepspeed_trainer(3, beta=0.1), monitors=True)
    with pytest.raises(ConfigError, match="monitor_kl_every"):
        reject_unsupported_layout(deepspeed_trainer(3), monitors=True)
    with pytest.raises(ConfigError, match="within its backward pass"):
        reject_unsupported_layout(deepspeed_trainer(2), monitors=False, recovers=True)
