"""A compiled model has the gradient of the model, also where the KL's share of it is looked at."""

import pytest
import torch

from klinic.learner.diagnostics import EARLY_INTERVAL
from klinic.learner.protocol import LossScales
from klinic.model.loading import load_policy
from klinic.model.reference import copy_as_reference
from klinic.recipe.sections import ModelSection
from tiny_policies import batch_of, gradient, learner_of, rollouts


def gradient_at(step, *, compiled):
    section = ModelSection(name="tiny", compile=compiled)
    policy = load_policy(section, temperature=1.0, seed=0)
    reference = copy_as_reference(policy.scorer, source="start")
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for p in reference.scorer.lm.parameters():
            p.add_(0.02 * torch.randn_like(p))
    learner = learner_of(policy, reference)
    scored = learner.score(batch_of(rollouts(), step=step), needs_reference=True)
    learner.prepare(scored, LossScales(kl_coef=1.0))
    return gradient(policy)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own doings
@pytest.mark.parametrize("step", [EARLY_INTERVAL + 1, EARLY_INTERVAL + 2])
def test_a_compiled_gradient_is_the_model_s(step):
    expected = gradient_at(step, compiled=False)
    found = gradient_at(step, compiled=True)
    assert float((found - expected).norm() / expected.norm()) < 1e-5
