"""The change that proves each cause, and the quantity that it affects.

Some causes have none: a prompt lost in transit is not in the record, an exploitable reward has no
single correct form, and prompts that are too hard stay so in a replay. Some runs allow none:
rewards passed as Python functions are not recorded and cannot be recomputed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from klinic.replay import learner_changes, sampler_changes
from klinic.replay.replay import BeforeAfter, Replay

REQUIRED_FACTOR = 5.0  # times smaller: the remainder then has another cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change, and the quantity to measure."""

    changed: str
    quantity: str
    measure: Callable[[Replay], BeforeAfter | None]
    """Return the quantity before and after; None where the run does not allow it."""
    holds: Callable[[float, float], bool]
    """Whether before and after prove the cause."""


def is_much_smaller(before: float, after: float) -> bool:
    """Whether a change removed most of a quantity."""
    return abs(after) * REQUIRED_FACTOR < abs(before)


def _was_corrected(before: float, after: float) -> bool:
    return abs(before - 1) > 0.05 and abs(after - 1) < 0.05


EXPECTED_GRADIENT = Change(
    changed="the KL term by the formula of its estimator",
    quantity="distance from the expected gradient, over the score's norm",
    measure=learner_changes.measure_kl_gradient,
    holds=is_much_smaller,
)
EMITTER_MASK = Change(
    changed="the mask from the emitter of each token",
    quantity="fraction of tokens with a wrong mask",
    measure=learner_changes.measure_emitted_mask,
    holds=is_much_smaller,
)

CHANGES: dict[str, Change] = {
    "stale-sampler": Change(
        changed="score with older weights",
        quantity="gap to the sampler, nats",
        measure=sampler_changes.measure_older_weights,
        holds=is_much_smaller,
    ),
    "temperature-on-one-side": Change(
        changed="score at the fitted temperature",
        quantity="gap in log-probs, nats",
        measure=sampler_changes.measure_fitted_temperature,
        holds=is_much_smaller,
    ),
    "wrong-reference": Change(
        changed="the initial policy as the reference",
        quantity="gap to the reference, nats",
        measure=learner_changes.measure_start_reference,
        holds=is_much_smaller,
    ),
    "misaligned-logp": Change(
        changed="log-probs shifted by the detected offset",
        quantity="gap in the affected rows, nats",
        measure=sampler_changes.measure_shift,
        holds=is_much_smaller,
    ),
    "retokenised": Change(
        changed="without rows that fail the tokenizer round trip",
        quantity="gap to the sampler, nats",
        measure=sampler_changes.measure_surviving_rows,
        holds=is_much_smaller,
    ),
    "wrong-loss-mask": EMITTER_MASK,
    "stop-token-fault": EMITTER_MASK,
    "kl-gradient-wrong": EXPECTED_GRADIENT,
    "kl-not-applied": EXPECTED_GRADIENT,
    "kl-sign-flipped": EXPECTED_GRADIENT,
    "kl-tail-dominates": Change(
        changed="kl.estimator unbiased",
        quantity="gradient norm",
        measure=learner_changes.measure_linear_tails,
        holds=is_much_smaller,
    ),
    "nan-outside-mask": Change(
        changed="masked tokens are dropped, not multiplied by 0",
        quantity="whether the loss is finite",
        measure=learner_changes.measure_masked_select,
        holds=lambda before, after: before == 0 and after == 1,
    ),
    "hidden-sampling-transform": Change(
        changed="score over fewer tokens (top-p or top-k)",
        quantity="gap to the sampler, nats",
        measure=sampler_changes.measure_truncated_sampling,
        holds=is_much_smaller,
    ),
    "truncation-not-mirrored": Change(
        changed="score over the tokens of the declared truncation",
        quantity="gap to the sampler, nats",
        measure=sampler_changes.measure_declared_truncation,
        holds=is_much_smaller,
    ),
    "corrupted-sync": Change(
        changed="weights loaded again, and sampled with them",
        quantity="gap to the sampler, nats",
        measure=sampler_changes.measure_loaded_weights,
        holds=is_much_smaller,
    ),
    "gradient-not-cleared": Change(
        changed="a gradient of 0 before the backward pass",
        quantity="gradient norm of a step without advantages",
        measure=learner_changes.measure_cleared_gradient,
        holds=is_much_smaller,
    ),
    "advantage-explodes": Change(
        changed="advantages by the recipe's formula",
        quantity="deviation of a group from its bound",
        measure=learner_changes.measure_advantages,
        holds=is_much_smaller,
    ),
    "wrong-groups": Change(
        changed="advantages within groups",
        quantity="deviation of a group from a sum of 0",
        measure=learner_changes.measure_advantages,
        holds=is_much_smaller,
    ),
    "loss-scaled-wrong": Change(
        changed="divided by the tokens of the whole step",
        quantity="gradient of half-size micro-batches over the full one",
        measure=learner_changes.measure_micro_batches,
        holds=_was_corrected,
    ),
    "dropout-in-scoring": Change(
        changed="no dropout",
        quantity="largest difference when scored twice, nats",
        measure=learner_changes.measure_without_dropout,
        holds=is_much_smaller,
    ),
    "layout-changes-logp": Change(
        changed="score every row alone",
        quantity="gap to the sampler, nats",
        measure=sampler_changes.measure_rows_alone,
        holds=is_much_smaller,
    ),
    "step-too-big": Change(
        changed="a tenth of the learning rate",
        quantity="KL(new || old) of the previous update, nats per token",
        measure=learner_changes.measure_smaller_rate,
        holds=is_much_smaller,
    ),
    "policy-does-not-move": Change(
        changed="the update in fp32",
        quantity="fraction of unchanged weights",
        measure=learner_changes.measure_full_precision,
        holds=lambda before, after: before > 0.9 > after,
    ),
    "broken-reward": Change(
        changed="completions graded again",
        quantity="fraction of equal rewards",
        measure=learner_changes.measure_regrading,
        holds=lambda before, after: before < 0.9 < after,
    ),
    "moved-reference": Change(
        changed="the initial policy as the reference",
        quantity="gap to the reference, nats",
        measure=learner_changes.measure_start_reference,
        holds=lambda before, after: abs(after) > 5 * abs(before) or abs(after - before) > 1e-3,
    ),
    "samples-too-old": Change(
        changed="score with the recorded weight version",
        quantity="gap to the sampler, nats",
        measure=sampler_changes.measure_recorded_weights,
        holds=is_much_smaller,
    ),
    "broken-sampler": Change(
        changed="a separate RNG stream per completion",
        quantity="pairs of equal completions",
        measure=sampler_changes.measure_separate_streams,
        holds=lambda before, after: after < before / 2,
    ),
    "wrong-metric": Change(
        changed="computed from rescored tokens",
        quantity="relative error of kl",
        measure=learner_changes.measure_logged_kl,
        holds=is_much_smaller,
    ),
}
"""By cause."""
