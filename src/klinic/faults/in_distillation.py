"""Faults of a run with a teacher, one or two mechanisms per cause.

They are apart from `FAULTS`: they need a teacher, which the runs of the scoreboard do not have. The
teacher here is a copy of the warm-started policy, which knows the task.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from klinic.evidence.record import StepRecord, select_rows
from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.learner import objective
from klinic.learner.local import LocalLearner
from klinic.model.reference import Reference, make_reference
from klinic.training import train

TEACHER_SETTINGS = {"teacher.path": "tiny", "teacher.coef": 0.1}
TEACHER_NOISE = 0.02  # of each tensor's standard deviation: a teacher that differs from the policy


@contextmanager
def competent_teacher(change: Callable[[Any], None] = lambda _: None) -> Iterator[None]:
    """Replace the teacher by a slightly perturbed copy of the policy, and change its model."""

    def start_competent_teacher(real: Any, recipe: Any, policy: Any, digests: Any) -> Any:
        if real(recipe, policy, digests) is None:
            return None
        scorer = copy.deepcopy(policy.scorer)
        add_noise(scorer.lm, TEACHER_NOISE)
        change(scorer.lm)
        return make_reference(scorer, source=recipe.teacher.path)

    with patch_attribute(train, "start_teacher", start_competent_teacher):
        yield


@torch.no_grad()
def add_noise(lm: Any, fraction: float) -> None:
    """Add noise to every weight, as a fraction of its tensor's standard deviation."""
    random = torch.Generator().manual_seed(2)
    for p in lm.parameters():
        if p.numel() > 1:
            p.add_(fraction * p.std() * torch.randn(p.shape, generator=random))


@torch.no_grad()
def _permute_tokens(lm: Any) -> None:
    """Give every token the id of another one, as a tokenizer with another order does."""
    rows = lm.get_input_embeddings().weight
    rows.copy_(rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(3))])


@contextmanager
def wrong_tokenizer(severity: Severity) -> Iterator[None]:
    """Let the teacher read all ids, or those of the digits, as other tokens."""
    del severity
    with competent_teacher(_permute_tokens):
        yield


@contextmanager
def reload_teacher(severity: Severity) -> Iterator[None]:
    """Reload other weights into the teacher after two updates."""
    fraction = {Severity.MILD: 0.02, Severity.NORMAL: 0.3}[severity]
    reloaded: list[int] = []

    def score_after_reload(real: Any, learner: Any, *args: Any, **options: Any) -> Any:
        if learner._num_updates >= 2 and not reloaded:
            add_noise(learner.teacher.scorer.lm, fraction)
            reloaded.append(learner._num_updates)
        return real(learner, *args, **options)

    with competent_teacher(), patch_attribute(LocalLearner, "score", score_after_reload):
        yield


@contextmanager
def teacher_follows_policy(severity: Severity) -> Iterator[None]:
    """Copy the policy into the teacher before every step, or every third."""
    every = {Severity.MILD: 3, Severity.NORMAL: 1}[severity]

    def score_after_copy(real: Any, learner: Any, *args: Any, **options: Any) -> Any:
        if learner._num_updates and learner._num_updates % every == 0:
            learner.teacher.scorer.lm.load_state_dict(learner.policy.lm.state_dict())
        return real(learner, *args, **options)

    with competent_teacher(), patch_attribute(LocalLearner, "score", score_after_copy):
        yield


def _score_with(swap: Callable[[Any], tuple[Reference, Reference]]) -> AbstractContextManager[None]:
    """Score with other models in the places of reference and teacher."""

    def score_swapped(real: Any, learner: Any, *args: Any, **options: Any) -> Any:
        before = learner.reference, learner.teacher
        learner.reference, learner.teacher = swap(learner)
        try:
            return real(learner, *args, **options)
        finally:
            learner.reference, learner.teacher = before

    return patch_attribute(LocalLearner, "score", score_swapped)


@contextmanager
def reference_teaches(severity: Severity) -> Iterator[None]:
    """Score the teacher term with the reference."""
    del severity
    with competent_teacher(), _score_with(lambda learner: (learner.reference, learner.reference)):
        yield


@contextmanager
def teacher_holds(severity: Severity) -> Iterator[None]:
    """Score the reference term with the teacher."""
    del severity
    with competent_teacher(), _score_with(lambda learner: (learner.teacher, learner.teacher)):
        yield


@contextmanager
def differentiate_teacher(severity: Severity) -> Iterator[None]:
    """Let the teacher's logits move with the policy's, as those of a shared body do."""
    fraction = {Severity.MILD: 0.3, Severity.NORMAL: 1.0}[severity]

    def moving_teacher(real: Any, scores: Any, targets: Any, logp: Any, loss: Any) -> Any:
        inputs = real(scores, targets, logp, loss)
        # in expectation over the sampled token: sum of (p - q) times the gradient of the logits
        coef = fraction * -torch.expm1(logp - inputs.logp).detach()
        change = coef * (inputs.logp - inputs.logp.detach())
        return replace(inputs, kl_exact=inputs.kl_exact - change)

    with (
        competent_teacher(),
        patch_attribute(objective, "teacher_kl_inputs", moving_teacher),
    ):
        yield


def _with_prompts_of_others(record: StepRecord) -> StepRecord:
    """Return the record with each row's prompt taken from a row of the next group."""
    rows = np.roll(np.arange(record.num_rows), -int((record.group == record.group[0]).sum()))
    others = select_rows(record, rows.tolist())
    return replace(record, prompt_ids=others.prompt_ids, prompt_offsets=others.prompt_offsets)


@contextmanager
def keep_old_prompts(severity: Severity) -> Iterator[None]:
    """Send the teacher the completions of this step after the prompts of other rows."""
    del severity

    def score_stale(real: Any, learner: Any, record: Any, **options: Any) -> Any:
        scored = real(learner, record, **options)
        stale = real(learner, _with_prompts_of_others(record), **options)
        logp_teacher = stale.targets.logp_teacher
        return replace(scored, targets=replace(scored.targets, logp_teacher=logp_teacher))

    with ExitStack() as stack:
        stack.enter_context(competent_teacher())
        stack.enter_context(patch_attribute(LocalLearner, "score", score_stale))
        yield


def _fault(cause: str, mechanism: str, inject: Callable[[Severity], Any], **settings: Any) -> Fault:
    return Fault(
        cause=cause, mechanism=mechanism, inject=inject, settings={**TEACHER_SETTINGS, **settings}
    )


TEACHER_FAULTS = (
    _fault("wrong-tokenizer", "the teacher's ids are in another order", wrong_tokenizer),
    _fault("swapped-teacher", "other weights are reloaded after two updates", reload_teacher),
    _fault("swapped-teacher", "the teacher is the policy", teacher_follows_policy),
    _fault("teacher-as-reference", "the reference scores the teacher term", reference_teaches),
    _fault("teacher-as-reference", "the teacher scores the reference term", teacher_holds),
    _fault("teacher-gradient-wrong", "the teacher is differentiated too", differentiate_teacher),
    _fault(
        "stale-teacher-prompts",
        "the teacher scores completions after prompts of other rows",
        keep_old_prompts,
        **{"teacher.estimator": "unbiased"},
    ),
)
