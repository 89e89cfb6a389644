"""Digests of the start policy: the values of every earlier run, from one pass over the weights."""

import pytest

from klinic.model import adapters, start_digests, weights
from klinic.model.adapters import base_digest, policy_digest
from klinic.model.reference import reference_at_start
from klinic.model.start_digests import StartDigests
from klinic.model.weights import digest
from tiny_policies import small_policy


@pytest.fixture
def hashed(monkeypatch):
    """The number of tensors of each digest that is computed."""
    sizes = []

    def counted(tensors):
        sizes.append(len(tensors))
        return digest(tensors)

    for module in (adapters, start_digests, weights):
        monkeypatch.setattr(module, "digest", counted)
    monkeypatch.setattr("klinic.model.reference.digest", counted)
    return sizes


@pytest.mark.parametrize("rank", [None, 2])
def test_the_values_are_those_of_single_passes(rank):
    lm = small_policy(lora_rank=rank).lm
    digests = StartDigests(lm)
    assert digests.base == base_digest(lm)
    assert digests.policy == policy_digest(lm)


@pytest.mark.parametrize(("rank", "passes"), [(None, 1), (2, 2)])
def test_reference_run_facts_and_checkpoints_share_one_pass(hashed, rank, passes):
    policy = small_policy(lora_rank=rank)
    digests = StartDigests(policy.lm)
    reference = reference_at_start(policy.scorer, source="start", digests=digests)
    assert reference.digest == (digests.policy if rank is None else digests.base)
    assert len(hashed) == passes  # with an adapter, of base and policy at the same time


def test_a_copy_has_the_digest_of_its_own_weights():
    policy = small_policy()
    reference = reference_at_start(policy.scorer, source="start")
    assert reference.digest == digest(reference.scorer.lm.state_dict())


def test_other_ranks_hash_nothing(hashed):
    digests = StartDigests(None)
    for rank in (None, 2):
        policy = small_policy(lora_rank=rank)
        assert reference_at_start(policy.scorer, source="start", digests=digests).digest == ""
    assert digests.of_other(policy.lm.state_dict()) == ""
    assert hashed == []
