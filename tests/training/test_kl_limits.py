"""Limits of the KL: the updates of a batch end, and completions far away are left out."""

from dataclasses import replace

import numpy as np
import pytest

import klinic
from klinic.errors import RunStoppedError
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.evidence.metrics import update_kl
from tiny_policies import batch_of, drifted_reference, learner_of, rollouts, small_policy
from training.killing import differences

pytestmark = [pytest.mark.usefixtures("as_before"), pytest.mark.timeout(300)]

ROWS = [{"prompt": f"{n}+{n}="} for n in range(20)]
SETTINGS = {
    "max_steps": 3,
    "prompts_per_step": 2,
    "group_size": 4,
    "max_new_tokens": 4,
    "learning_rate": 1e-3,
    "kl_coef": 0.1,
    "output.trackers": [],
    "output.doctor": "none",
    "threads": 1,
}


def digits(prompts, completions, **_):
    return [float(sum(c.isdigit() for c in text)) for text in completions]


def train(folder, **settings):
    return klinic.train(
        model="tiny",
        train_dataset=ROWS,
        **{"reward_funcs": digits, **SETTINGS, "output.dir": str(folder), **settings},
    )


def steps(folder):
    return [e for e in Journal(folder / "metrics.jsonl").entries() if "loss" in e]


def test_the_kl_of_an_update_is_what_enumeration_says():
    """Over all outcomes of a token, weighted by the old policy, it is KL(new || old)."""
    new, old = np.log([0.7, 0.2, 0.1]), np.log([0.5, 0.3, 0.2])
    record = batch_of(rollouts(num_prompts=1, group_size=2))
    total = 0.0
    for outcome in range(3):
        flat = np.full(record.num_tokens, 1.0)
        one = {"logp": flat * new[outcome], "logp_old": flat * old[outcome]}
        value = update_kl(replace(record, **one))
        assert value >= 0
        total += np.exp(old[outcome]) * value
    assert total == pytest.approx(float((np.exp(new) * (new - old)).sum()), abs=1e-12)


def test_updates_end_where_the_policy_has_gone_far_enough(tmp_path):
    train(tmp_path / "free", **{"learner.updates_per_batch": 4})
    far = {"learner.updates_per_batch": 4, "recovery.update_kl_limit": 1e6}
    train(tmp_path / "far", **far)
    assert [e["updates_left"] for e in steps(tmp_path / "far")] == [0.0] * 3
    reached = max(e["kl_new_old"] for e in steps(tmp_path / "far"))
    assert reached > 0
    found = differences(tmp_path / "free", tmp_path / "far")
    assert all("metrics" in line for line in found)  # the limit is seen, and changes nothing
    near = {"learner.updates_per_batch": 4, "recovery.update_kl_limit": reached / 5}
    train(tmp_path / "near", **near)
    left = [e["updates_left"] for e in steps(tmp_path / "near")]
    assert max(left) > 0
    assert max(e["kl_new_old"] for e in steps(tmp_path / "near")) < reached


def test_one_update_that_ruins_the_policy_is_undone(tmp_path):
    with pytest.raises(RunStoppedError, match=r"update KL .* nats per token"):
        train(tmp_path / "run", **{"recovery.update_kl_limit": 1e-12})
    events = list(Journal(tmp_path / "run" / "events.jsonl").entries())
    assert [e["act"] for e in events][:2] == ["replay", "roll back"]
    last = max((tmp_path / "run" / "checkpoints").glob("step=*"))
    assert last.name == "step=000000"


def test_what_is_summed_over_a_completion():
    policy = small_policy()
    learner = learner_of(policy, drifted_reference(policy))
    record = batch_of(rollouts())
    scored = learner.score(record, needs_reference=True)
    apart = record.logp_sampler.astype(np.float64) - scored.targets.logp_ref.numpy()
    for row, total in enumerate(learner.sequence_kl(scored)):
        part = slice(record.row_offsets[row], record.row_offsets[row + 1])
        assert total == pytest.approx(apart[part][record.loss_mask[part]].sum(), abs=1e-9)
    assert learner.sequence_kl(learner.score(record, needs_reference=False)) is None


def test_completions_far_from_the_reference_have_a_kl_term_alone(tmp_path):
    start = train(tmp_path / "elsewhere", learning_rate=3e-3, kl=None)
    tied = {"reference": str(start.model), "kl.rollout_limit": 1e6}
    train(tmp_path / "all", **tied)
    assert [e["completions/kl_dropped"] for e in steps(tmp_path / "all")] == [0.0] * 3
    record = store.read_record(tmp_path / "all", 1)
    apart = np.where(record.loss_mask, record.logp_sampler - record.logp_ref, 0.0)
    sums = np.add.reduceat(apart, record.row_offsets[:-1])
    limit = float(np.sort(sums)[-3:-1].mean())  # one or two of eight are above
    train(tmp_path / "some", **{**tied, "kl.rollout_limit": limit})
    first = steps(tmp_path / "some")[0]
    assert first["completions/kl_dropped"] == (sums > limit).sum() >= 1
    limited = store.read_record(tmp_path / "some", 1)
    assert np.array_equal(np.isnan(limited.reward), sums > limit)
    assert not limited.advantage[sums > limit].any()
    # metrics and controller see all of them, and so does the KL term
    whole = steps(tmp_path / "all")[0]
    for name in ("kl", "kl_k1/mean", "kl_loss", "reward"):
        assert first[name] == whole[name]
    assert first["grad_norm"] != whole["grad_norm"]


def test_nothing_near_the_reference_stops_the_run(tmp_path):
    start = train(tmp_path / "elsewhere", learning_rate=3e-3, kl=None)
    limits = {"reference": str(start.model), "kl.rollout_limit": 1e-9, "learning_rate": 0.0}
    rows = {"group_size": 2, "prompts_per_step": 1, "seed": 3}
    with pytest.raises(RunStoppedError, match=r"sequence KL .* nats, limit 1e-09"):
        train(tmp_path / "run", **{**limits, **rows})


def test_without_recovery_a_step_far_from_the_reference_trains_on_the_kl_alone(tmp_path):
    """The update is that of a step whose rewards are all equal; at coefficient 0 there is none."""
    start = train(tmp_path / "elsewhere", learning_rate=3e-3, kl=None)
    rows = {"group_size": 2, "prompts_per_step": 1, "seed": 3, "max_steps": 1}
    far = {"reference": str(start.model), "recovery": None, **rows}
    weights = {}
    for name, how in {
        "limited": {"kl.rollout_limit": 1e-9},
        "kl alone": {"reward_funcs": lambda completions, **_: [0.0] * len(completions)},
        "nothing": {"kl.rollout_limit": 1e-9, "kl_coef": 0.0},
    }.items():
        result = train(tmp_path / name, **{**far, **how})
        weights[name] = (result.model / "model.safetensors").read_bytes()
    limited, nothing = steps(tmp_path / "limited")[0], steps(tmp_path / "nothing")[0]
    assert limited["completions/kl_dropped"] == nothing["completions/kl_dropped"] == 2
    assert (limited["discarded"], nothing["discarded"]) == (0, 1)
    assert limited["grad_norm"] == steps(tmp_path / "kl alone")[0]["grad_norm"] > 0
    assert weights["limited"] == weights["kl alone"] != weights["nothing"]
