"""Selects the one curve that shows the evidence of a named cause."""

from collections.abc import Container, Iterator
from dataclasses import dataclass

from klinic.checks import CHECKS
from klinic.checks.base import Check

EXPECTED = {
    "gap/sampler": "The sampler and the policy are the same model, so a healthy gap is near 0.",
    "gap/reference": "A healthy policy leaves the reference slowly, from 0 at the first step.",
    "gap/update": "A healthy gap is near 0 if each batch has one update.",
    "kl": "A healthy KL starts at 0 and rises slowly.",
    "reward": "A healthy reward rises.",
    "eval/accuracy": "Healthy: the held-out accuracy rises with the reward.",
    "grad_norm": "A healthy gradient norm is neither 0 nor exploding.",
    "entropy": "A healthy entropy falls slowly, and starts far below that of random tokens.",
    "completions/clipped_ratio": "Healthy: few completions are cut off.",
    "completions/parse_rate": "Healthy: most answers can be read.",
    "recorded/trained": "Healthy: every token that the policy emitted is trained on, no other.",
    "recorded/equal_groups": "Prompts with equal rewards teach nothing; 1 means no signal at all.",
}
"""What a healthy curve looks like, for each curve that can be evidence."""

BY_CAUSE = {
    "broken-reward": ("recorded/reward", "reward"),
    "cliff-rewards": ("reward", "recorded/reward"),
    "context-truncated": ("completions/clipped_ratio", "recorded/length"),
    "equal-rewards": ("recorded/equal_groups", "frac_reward_zero_std", "reward"),
    "reward-hacking": ("eval/accuracy", "reward"),
    "stop-token-fault": ("completions/clipped_ratio", "recorded/length"),
    "wrong-loss-mask": ("recorded/trained",),
    "wrong-metric": ("kl",),
    "step-too-big": ("gap/reference", "kl"),
    "kl-tail-dominates": ("kl", "gap/reference"),
    "moved-reference": ("gap/reference", "kl"),
    "random-weights": ("entropy",),
    "dropout-in-scoring": ("gap/sampler", "gap/update", "gap/reference"),
    "malformed-output": ("completions/parse_rate",),
    "misplaced-advantage": ("recorded/reward", "reward"),
    "policy-does-not-move": ("grad_norm",),
    "gradient-not-cleared": ("grad_norm",),
    "loss-scaled-wrong": ("grad_norm",),
    "state-lost": ("grad_norm",),
}
"""Curves by cause, the best first, where they do not follow from what the check needs."""

BY_FIELD = (
    ("record.logp_sampler", "gap/sampler"),
    ("record.logp_ref", "gap/reference"),
    ("probes.kl_gradient", "kl"),
    ("probes.kl_gradient", "gap/reference"),
    ("record.entropy", "entropy"),
    ("record.advantage", "recorded/reward"),
    ("record.reward", "recorded/reward"),
    ("facts.grad_norm", "grad_norm"),
    ("probes.policy_gradient", "grad_norm"),
    ("record.loss_mask", "recorded/trained"),
)
"""A field of the evidence, and the curve that shows it."""

CHECKS_BY_NAME: dict[str, Check] = {check.name: check for check in CHECKS}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidencePicture:
    """A curve with the step from which the cause is visible."""

    curve: str
    first_step: int | None
    expected: str
    """What the curve looks like in a healthy run."""


def choose_picture(
    cause: str, first_step: int | None, available: Container[str], prefer: tuple[str, ...] = ()
) -> EvidencePicture | None:
    """Return the first curve for a cause that was recorded; None if there is none."""
    for curve in (*prefer, *_candidates(cause)):
        if curve in available:
            expected = EXPECTED.get(curve, "")
            return EvidencePicture(curve=curve, first_step=first_step, expected=expected)
    return None


def gap_lane(picture: EvidencePicture | None) -> str:
    """Return the log-prob gap that a picture shows; that to the reference by default."""
    if picture is not None and picture.curve.startswith("gap/"):
        return picture.curve.removeprefix("gap/")
    return "reference"


def _candidates(cause: str) -> Iterator[str]:
    yield from BY_CAUSE.get(cause, ())
    check = CHECKS_BY_NAME.get(cause)
    if check is not None:
        for fields in (check.deciding_fields, check.all_fields):
            yield from (curve for field, curve in BY_FIELD if field in fields)
    yield from ("kl", "reward", "recorded/reward")
