"""Prints where the host waits for the device in one step of a learner, by phase."""

import json
import sys

import numpy as np
import torch
from host_reads import HostReads

from klinic.learner.protocol import LossScales
from klinic.model.loading import load_policy
from klinic.model.reference import copy_as_reference
from klinic.recipe.sections import ModelSection
from tiny_policies import batch_of, learner_of, rollouts

if __name__ == "__main__":
    torch.set_num_threads(1)
    policy = load_policy(ModelSection(name="tiny"), temperature=1.0, seed=0)
    reference = copy_as_reference(policy.scorer, source="tiny")
    found = {}
    for estimator in sys.argv[1:]:
        learner = learner_of(policy, reference, micro_batch_size=4, estimator=estimator)
        record = batch_of(rollouts(), step=12)
        with HostReads() as scoring:
            scored = learner.score(record, needs_reference=True)
        with HostReads() as preparing:
            learner.prepare(scored, LossScales(kl_coef=0.1))
        with HostReads() as updating:
            learner.commit()
        found[estimator] = {
            "batches": len(scored.batches),
            "own": dict(scoring.own + preparing.own + updating.own),
            "of_libraries": dict(
                scoring.of_libraries + preparing.of_libraries + updating.of_libraries
            ),
            "uploads": dict(scoring.uploads + preparing.uploads + updating.uploads),
            "kernels": (scoring.kernels + preparing.kernels + updating.kernels).total(),
        }
    assert not any(np.isnan(p.detach().cpu().numpy()).any() for p in policy.lm.parameters())
    sys.stdout.write(json.dumps(found))
