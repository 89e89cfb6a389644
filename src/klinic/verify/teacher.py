"""Proves the teacher term by enumeration, through the loss function that training calls.

Policy, reference and teacher are three different policies of one world. The loss of a step is
summed over every pair of completions, and its gradient compared with exact sums: with the teacher
term alone, and beside the term to the reference.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from klinic.learner.objective import LossTargets, Objective, TeacherTerm, loss_terms
from klinic.maths import kl
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.model.token_scores import TokenScores
from klinic.verify.estimators import promised_identity
from klinic.verify.expectation import UNCAPPED, EnumeratedPairs
from klinic.verify.identify import TOLERANCE, Targets, relative_norm, worst_error
from klinic.verify.identity_check import IdentityCheck
from klinic.verify.targets import TOP_K, target_gradients
from klinic.verify.toy_policies import COMPLETION_LENGTH, World

KL_COEF, TEACHER_COEF = 0.3, 0.7
REFERENCE_ESTIMATOR = "unbiased"
WORLD_NAMES = ("far", "shared eos", "top-p")
"""One world of each kind: separate logits, shared parameters, truncated sampling."""
TEACHER_DRIFT = 0.8  # standard deviation of the teacher's parameters around the reference's


@dataclass(frozen=True, kw_only=True)
class TeacherWorld:
    """A world with a teacher, its enumerated pairs and the exact gradients to both models."""

    pairs: EnumeratedPairs
    teacher_rows: Float[Tensor, "N V"]
    """The teacher's log-probs at each token."""
    to_reference: Targets
    to_teacher: Targets

    @classmethod
    def from_world(cls, world: World, *, seed: int = 0) -> "TeacherWorld":
        """Add a random teacher to a world and enumerate its pairs."""
        rng = torch.Generator().manual_seed(seed)
        drift = torch.randn(len(world.theta), generator=rng, dtype=torch.float64)
        theta_teacher = world.theta_ref + TEACHER_DRIFT * drift
        pairs = EnumeratedPairs.from_world(world)
        return cls(
            pairs=pairs,
            teacher_rows=world.prefix_log_probs(theta_teacher)[world.completion_pairs.state],
            to_reference=target_gradients(world),
            to_teacher=target_gradients(replace(world, theta_ref=theta_teacher)),
        )

    def loss_gradient(self, estimator: str, *, kl_coef: float = 0.0) -> Float[Tensor, "P"]:
        """Return the expected gradient of the loss of a training step, without rewards."""
        objective = Objective(
            loss="dr_grpo",
            estimator=REFERENCE_ESTIMATOR if kl_coef else None,
            clip_low=0.2,
            clip_high=0.2,
            mask_truncated=False,
            max_new_tokens=COMPLETION_LENGTH,
            importance_sampling=UNCAPPED,
            teacher=TeacherTerm(estimator=estimator, coef=TEACHER_COEF, alone=True),
        )
        terms = loss_terms(self._scores(), self._targets(), objective)
        loss = terms.total_loss(kl_coef=kl_coef, teacher_coef=TEACHER_COEF)
        return self.pairs.total_gradient(loss[None])

    def _scores(self) -> TokenScores:
        inputs, rows = self.pairs.inputs, self.pairs.leaf_logits.log_softmax(-1)
        both = {"logp_p": rows, "logp_q": self.teacher_rows}
        return TokenScores(
            logp=inputs.logp,
            entropy=torch.zeros_like(inputs.logp),
            rank=torch.zeros_like(inputs.logp, dtype=torch.int64),
            kl_exact=inputs.kl_exact,
            kl_topk=inputs.kl_topk,
            teacher_kl_exact=kl.exact(**both),
            teacher_kl_topk=kl.topk(**both, k=TOP_K),
        )

    def _targets(self) -> LossTargets:
        pairs, inputs = self.pairs, self.pairs.inputs
        token = pairs.world.completion_pairs.token
        weight = pairs.weights * pairs.world.pair_probability[pairs.pair_of_token]
        return LossTargets(
            row_offsets=inputs.row_offsets,
            group=inputs.group,
            advantage=torch.zeros(len(inputs.group), dtype=weight.dtype),
            loss_mask=inputs.loss_mask,
            policy_weight=weight,
            kl_weight=weight,
            logp_sampler=inputs.logp_sampler,
            logp_old=inputs.logp_old,
            logp_ref=inputs.logp_ref,
            logp_teacher=self.teacher_rows.gather(-1, token[:, None])[:, 0],
        )


def check_teacher(worlds: Sequence[World]) -> list[IdentityCheck]:
    """Return the identities of the teacher term, one per estimator and one for both terms."""
    used = [world for world in worlds if world.name in WORLD_NAMES] or worlds
    teacher_worlds = [TeacherWorld.from_world(world) for world in used]
    return [
        *(_check_alone(name, teacher_worlds) for name in ESTIMATORS),
        _check_beside_reference(teacher_worlds),
    ]


def _check_alone(name: str, worlds: Sequence[TeacherWorld]) -> IdentityCheck:
    identity = promised_identity(ESTIMATORS[name])
    errors = []
    for world in worlds:
        exact = 0.0 if identity == "zero" else TEACHER_COEF * world.to_teacher[identity]
        errors.append(relative_norm(world.loss_gradient(name) - exact, world.to_teacher))
    return IdentityCheck(
        name=f"gradient of {name} to a teacher",
        statement=f"the loss of a step with {name} to a teacher has the gradient {identity} of it",
        error=worst_error(errors),
        tolerance=TOLERANCE,
    )


def _check_beside_reference(worlds: Sequence[TeacherWorld]) -> IdentityCheck:
    errors = []
    for world in worlds:
        to_reference = KL_COEF * world.to_reference["reverse_token"]
        for name, estimator in ESTIMATORS.items():
            if estimator.kind != "offered":
                continue
            exact = TEACHER_COEF * world.to_teacher[promised_identity(estimator)] + to_reference
            difference = world.loss_gradient(name, kl_coef=KL_COEF) - exact
            errors.append(relative_norm(difference, world.to_teacher))
    return IdentityCheck(
        name="reference and teacher together",
        statement="with both terms the gradient is the sum of both, each times its coefficient",
        error=worst_error(errors),
    )
