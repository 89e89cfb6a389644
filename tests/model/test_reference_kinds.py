"""Every kind of reference starts at its policy; what moves does so by the formula, and alone."""

import warnings

import numpy as np
import pytest
import torch

from klinic.capacity.meta_policy import build_meta_policy
from klinic.errors import CheckpointError, PolicyError
from klinic.learner.checkpoint import save_model
from klinic.learner.protocol import LossScales
from klinic.maths import kl
from klinic.model import moving_reference
from klinic.model.adapters import policy_digest
from klinic.model.equivalence import probe_logp
from klinic.model.loading import load_scorer
from klinic.model.moving_reference import make_moving_reference
from klinic.model.reference import make_adapter_off_reference, make_reference, reference_at_start
from klinic.recipe.sections import ModelSection
from model.foreign import KINDS, move, policy_of, write_adapter, write_base
from tiny_policies import batch_of, learner_of, rollouts, small_model, small_policy

FRESH = {"whole": None, "fresh": 4}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module", params=["plain", "dora", "own_head", "pissa"])
def adapter(request, base):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied heads
        return write_adapter(base.with_name(request.param), base, **KINDS[request.param])


def tied(policy, *, moves=False):
    reference = reference_at_start(policy.scorer, source="start", moves=moves)
    return make_moving_reference(policy.scorer, reference, source="start") if moves else reference


def says(reference):
    with reference._active_adapter():
        return probe_logp(reference.scorer)


def follows(policy, reference):
    """Whether an update of the policy is one of the reference, which then is no reference."""
    before = says(reference)
    move(policy)
    return not torch.equal(says(reference), before)


def step(learner, number, *, kl_coef=0.1):
    scored = learner.score(batch_of(rollouts(), step=number), needs_reference=True)
    prepared = learner.prepare(scored, LossScales(kl_coef=kl_coef))
    learner.commit()
    return prepared


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("rank", FRESH.values(), ids=FRESH)
def test_a_reference_starts_at_its_policy_and_stays_when_that_moves(rank, moves):
    policy = small_policy(lora_rank=rank)
    reference = tied(policy, moves=moves)
    expected = "copy" if rank is None else "adapter_frozen" if moves else "adapter_off"
    assert reference.kind == expected
    learner = learner_of(policy, reference)
    record = step(learner, 1).record
    assert np.array_equal(record.logp, record.logp_ref)
    assert not follows(policy, reference)
    later = step(learner, 2).record
    assert not np.array_equal(later.logp, later.logp_ref)
    assert np.array_equal(later.logp_ref, record.logp_ref)


def test_a_reference_that_shares_tensors_is_seen_to_follow_and_may_not_move():
    policy = small_policy()
    shared = make_reference(policy.scorer, source="start")
    policy.scorer.requires_grad_(True)  # as a copy that is none would leave it
    assert follows(policy, shared)
    with pytest.raises(PolicyError, match=r"shares .* with the policy, so it would follow"):
        make_moving_reference(policy.scorer, shared, source="start")
    adapted = small_policy(lora_rank=2)
    reference = reference_at_start(adapted.scorer, source="start", moves=True)
    weights = dict(adapted.lm.named_parameters())
    with torch.no_grad():
        for name, p in weights.items():
            if ".default." in name:
                weights[name.replace(".default.", ".reference.")].data = p.data
    with pytest.raises(PolicyError, match="shares"):
        make_moving_reference(adapted.scorer, reference, source="start")


@pytest.mark.parametrize("rank", FRESH.values(), ids=FRESH)
def test_an_average_is_what_its_closed_form_says(rank):
    policy = small_policy(lora_rank=rank)
    reference = tied(policy, moves=True)
    snapshots = [{name: p.detach().double() for name, p in reference.policy_tensors.items()}]
    for number in (1, 2, 3):
        move(policy, by=0.1 * number)
        reference.move_towards_policy(step=number, keep=0.75)
        snapshots.append(
            {name: p.detach().double() for name, p in reference.policy_tensors.items()}
        )
    shares = [0.75**3, 0.25 * 0.75**2, 0.25 * 0.75, 0.25]
    for name, mine in reference.reference_tensors.items():
        expected = sum(share * at[name] for share, at in zip(shares, snapshots, strict=True))
        assert torch.allclose(mine.double(), expected, rtol=0, atol=1e-6)
        assert not torch.allclose(mine, reference.policy_tensors[name], atol=1e-3)
        assert mine.dtype == torch.float32
    assert (reference.step, reference.last_reset) == (3, 1)


def test_an_average_of_a_policy_that_stands_still_does_not_move_by_rounding():
    policy = small_policy()
    reference = tied(policy, moves=True)
    before = reference.digest
    for number in range(1, 6):
        reference.move_towards_policy(step=number, keep=0.9)
    assert reference.digest == before


@pytest.mark.parametrize("rank", FRESH.values(), ids=FRESH)
def test_a_reset_makes_policy_and_reference_one_and_leaves_the_start(rank):
    policy = small_policy(lora_rank=rank)
    start = probe_logp(policy.scorer)
    reference = tied(policy, moves=True)
    learner = learner_of(policy, reference)
    for number in (1, 2, 3):
        step(learner, number)
    identity = learner.move_reference(3, keep=0.0, forget_moments=False)
    assert identity["digest"] == policy_digest(policy.lm)
    assert (identity["step"], identity["kind"]) == (3, reference.kind)
    after = step(learner, 4)
    assert np.array_equal(after.record.logp, after.record.logp_ref)
    assert after.record.facts["reference_step"] == 3
    assert after.record.facts["reference_digest"] == identity["digest"]
    assert torch.equal(says(reference.start_reference), start)
    assert not follows(policy, reference)


def test_adapters_of_every_kind_can_be_moved_to_and_their_start_is_kept(adapter):
    policy = policy_of(adapter)
    start = probe_logp(policy.scorer)
    trained = {name for name, p in policy.lm.named_parameters() if p.requires_grad}
    num = sum(p.numel() for p in policy.lm.parameters())
    own = sum(p.numel() for p in policy.lm.parameters() if p.requires_grad)
    reference = tied(policy, moves=True)
    assert sum(p.numel() for p in policy.lm.parameters()) == num + 2 * own  # the base only once
    assert reference.reference_tensors.keys() == trained
    move(policy)
    reference.move_towards_policy(step=1, keep=0.5)
    assert not torch.equal(says(reference), start)
    reference.move_towards_policy(step=2, keep=0.0)
    assert reference.digest == policy_digest(policy.lm)
    assert torch.equal(says(reference), probe_logp(policy.scorer))
    assert torch.equal(says(reference.start_reference), start)
    assert trained == {name for name, p in policy.lm.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("rank", FRESH.values(), ids=FRESH)
@pytest.mark.parametrize("affordable", [2**28, 0])
def test_going_back_brings_the_same_reference(tmp_path, monkeypatch, rank, affordable):
    monkeypatch.setattr(moving_reference, "MAX_DIGEST_BYTES", affordable)
    policy = small_policy(lora_rank=rank)
    reference = tied(policy, moves=True)
    learner = learner_of(policy, reference)
    step(learner, 1)
    learner.move_reference(1, keep=0.9, forget_moments=False)
    assert reference.digest.startswith("sampled:") == (affordable == 0)
    identity, before = reference.identity(), says(reference)
    state = learner.save(tmp_path)
    assert state["reference"] == identity
    step(learner, 2)
    learner.move_reference(2, keep=0.0, forget_moments=True)
    assert not torch.equal(says(reference), before)
    learner.load(tmp_path, state)
    assert reference.identity() == identity
    assert torch.equal(says(reference), before)
    other = {**state, "reference": {**identity, "digest": "0" * 64}}
    with pytest.raises(CheckpointError, match="was saved with the digest 0000"):
        learner.load(tmp_path, other)
    with pytest.raises(CheckpointError, match="checkpoint with a fixed reference"):
        learner.load(tmp_path, {"num_updates": 1})


def test_a_reset_may_forget_the_moments_and_a_checkpoint_then_has_none(tmp_path):
    policy = small_policy()
    learner = learner_of(policy, tied(policy, moves=True))
    step(learner, 1)
    learner.move_reference(1, keep=0.0, forget_moments=False)
    assert learner._optimizer.state
    learner.move_reference(1, keep=0.0, forget_moments=True)
    assert not learner._optimizer.state
    state = learner.save(tmp_path)
    step(learner, 2)
    learner.load(tmp_path, state)
    assert not learner._optimizer.state


def test_a_reference_that_stands_still_is_not_in_a_checkpoint(tmp_path):
    policy = small_policy()
    learner = learner_of(policy, tied(policy))
    assert learner.save(tmp_path) == {"num_updates": 0}
    assert not (tmp_path / "reference.safetensors").exists()
    assert learner.move_reference(1, keep=0.0, forget_moments=True) is None


@pytest.mark.parametrize("rank", FRESH.values(), ids=FRESH)
def test_the_way_from_the_start_is_measured_once_the_reference_has_left_it(rank):
    policy = small_policy(lora_rank=rank)
    reference = tied(policy, moves=True)
    learner = learner_of(policy, reference)
    first = step(learner, 1)
    assert "kl_to_start" not in first.metrics
    logp_start = first.record.logp  # every batch has the same tokens
    learner.move_reference(1, keep=0.0, forget_moments=False)
    found = {}
    for number in range(2, 12):
        done = step(learner, number)
        found[number] = done.metrics.get("kl_to_start")
        if found[number] is not None:
            now = done.record.logp_old.astype(np.float64)
            k3 = kl.k3(logp_p=now, logp_q=logp_start.astype(np.float64))
            assert found[number] == pytest.approx(k3[done.record.loss_mask].mean(), rel=1e-12)
            assert found[number] > 0
    assert [number for number, value in found.items() if value is not None] == [2, 11]
    still = small_policy(lora_rank=rank)
    learner = learner_of(still, tied(still))
    assert not any("kl_to_start" in step(learner, number).metrics for number in (1, 2, 11))


def test_switching_off_an_adapter_that_was_trained_is_refused(base, tmp_path):
    policy = policy_of(write_adapter(tmp_path / "sft", base))
    with pytest.raises(PolicyError, match=r"(?s)does not start at 0.*frozen copy.*reference\.path"):
        make_adapter_off_reference(policy.scorer, source="sft")
    fresh = small_policy(lora_rank=2)
    assert make_adapter_off_reference(fresh.scorer, source="small").kind == "adapter_off"


def test_what_cannot_become_the_policy_may_not_move(base, tmp_path):
    adapted = policy_of(base, lora_rank=2)
    other = make_reference(load_scorer(str(base), like=adapted, seed=0), source=str(base))
    with pytest.raises(PolicyError, match="a separate model, but the policy trains an adapter"):
        make_moving_reference(adapted.scorer, other, source="start")
    off = make_adapter_off_reference(adapted.scorer, source="start")
    with pytest.raises(PolicyError, match="has no weights of its own to move"):
        make_moving_reference(adapted.scorer, off, source="start")
    policy = small_policy()
    for config, why in (
        ({"n_layer": 3}, "its config differs"),
        ({"n_layer": 1}, "missing"),
        ({"n_embd": 8}, r"is \(\d+, 8\)"),
        ({"n_head": 4}, "its config differs"),
    ):
        model = small_policy(model=small_model(**config))
        reference = make_reference(model.scorer, source="other")
        with pytest.raises(PolicyError, match=why):
            make_moving_reference(policy.scorer, reference, source="start")


def test_another_checkpoint_may_move_and_is_the_policy_after_a_reset(tmp_path):
    policy = small_policy()
    save_model(tmp_path / "start", policy)
    start = probe_logp(policy.scorer)
    other = small_policy()
    move(other, by=0.05)
    save_model(tmp_path / "other", other)
    scorer = load_scorer(str(tmp_path / "other"), like=policy, seed=0)
    reference = make_moving_reference(
        policy.scorer, make_reference(scorer, source="other"), source="start"
    )
    assert torch.equal(says(reference), probe_logp(other.scorer))
    assert torch.equal(says(reference.start_reference), start)
    move(policy)
    reference.move_towards_policy(step=1, keep=0.0)
    assert torch.equal(says(reference), probe_logp(policy.scorer))


def test_a_reference_that_moves_is_counted_with_its_start(tmp_path, base):
    whole = build_meta_policy(ModelSection(name="tiny"), temperature=1.0, tied_to=True, moves=True)
    assert whole.meter.live["reference"] == 2 * whole.meter.live["weights"]
    adapter = write_adapter(tmp_path / "sft", base)
    for section, copies in (
        (ModelSection(name="tiny", lora_rank=4), 1),
        (ModelSection(name=str(adapter)), 2),
    ):
        alone = build_meta_policy(section, temperature=1.0, tied_to=False)
        tied_to = build_meta_policy(section, temperature=1.0, tied_to=True, moves=True)
        assert tied_to.reference.kind == "adapter_frozen"
        assert tied_to.num_trainable == alone.num_trainable
        more = tied_to.num_parameters - alone.num_parameters
        assert more == copies * alone.num_trainable
