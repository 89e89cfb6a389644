"""The change that proves each cause, and the quantity that it affects.

Some causes have none: a prompt lost in transit is not in the record, an exploitable reward has no
single correct form, and prompts that are too hard stay so in a replay. Some runs allow none:
rewards passed as Python functions are not recorded and cannot be recomputed.
"""

from klinic.probe import learner_changes, sampler_changes
from klinic.probe.proof import Change, much_smaller


def _was_off(before: float, after: float) -> bool:
    return abs(before - 1) > 0.05 and abs(after - 1) < 0.05


PROMISED_GRADIENT = Change(
    changed="the KL term by the formula of its estimator",
    quantity="distance from the expected gradient, over the score's norm",
    measure=learner_changes.right_gradient,
    holds=much_smaller,
)
OWN_MASK = Change(
    changed="the mask from the emitter of each token",
    quantity="fraction of tokens with a wrong mask",
    measure=learner_changes.emitted_mask,
    holds=much_smaller,
)

CHANGES: dict[str, Change] = {
    "stale-sampler": Change(
        changed="score with older weights",
        quantity="gap to the sampler, nats",
        measure=sampler_changes.first_weights,
        holds=much_smaller,
    ),
    "temperature-on-one-side": Change(
        changed="score at the fitted temperature",
        quantity="gap in log-probs, nats",
        measure=sampler_changes.fitted_temperature,
        holds=much_smaller,
    ),
    "wrong-reference": Change(
        changed="the initial policy as the reference",
        quantity="gap to the reference, nats",
        measure=learner_changes.start_as_reference,
        holds=much_smaller,
    ),
    "misaligned-logp": Change(
        changed="log-probs shifted by the detected offset",
        quantity="gap in the affected rows, nats",
        measure=sampler_changes.found_shift,
        holds=much_smaller,
    ),
    "retokenised": Change(
        changed="without rows that fail the tokenizer round trip",
        quantity="gap to the sampler, nats",
        measure=sampler_changes.surviving_rows,
        holds=much_smaller,
    ),
    "wrong-loss-mask": OWN_MASK,
    "stop-token-fault": OWN_MASK,
    "kl-gradient-wrong": PROMISED_GRADIENT,
    "kl-not-applied": PROMISED_GRADIENT,
    "kl-sign-flipped": PROMISED_GRADIENT,
    "kl-tail-dominates": Change(
        changed="kl.estimator unbiased",
        quantity="gradient norm",
        measure=learner_changes.linear_tails,
        holds=much_smaller,
    ),
    "nan-outside-mask": Change(
        changed="masked tokens are dropped, not multiplied by 0",
        quantity="whether the loss is finite",
        measure=learner_changes.chosen_not_multiplied,
        holds=lambda before, after: before == 0 and after == 1,
    ),
    "hidden-sampling-transform": Change(
        changed="score over fewer tokens (top-p or top-k)",
        quantity="gap to the sampler, nats",
        measure=sampler_changes.narrowed,
        holds=much_smaller,
    ),
    "advantage-explodes": Change(
        changed="advantages by the recipe's formula",
        quantity="deviation of a group from its bound",
        measure=learner_changes.own_advantages,
        holds=much_smaller,
    ),
    "wrong-groups": Change(
        changed="advantages within groups",
        quantity="deviation of a group from a sum of 0",
        measure=learner_changes.own_advantages,
        holds=much_smaller,
    ),
    "loss-scaled-wrong": Change(
        changed="divided by the tokens of the whole step",
        quantity="gradient of half-size micro-batches over the full one",
        measure=learner_changes.cut_otherwise,
        holds=_was_off,
    ),
    "dropout-in-scoring": Change(
        changed="no dropout",
        quantity="largest difference when scored twice, nats",
        measure=learner_changes.no_dropout,
        holds=much_smaller,
    ),
    "layout-changes-logp": Change(
        changed="score every row alone",
        quantity="gap to the sampler, nats",
        measure=sampler_changes.rows_alone,
        holds=much_smaller,
    ),
    "step-too-big": Change(
        changed="a tenth of the learning rate",
        quantity="KL(new || old) of the previous update, nats per token",
        measure=learner_changes.smaller_rate,
        holds=much_smaller,
    ),
    "policy-does-not-move": Change(
        changed="the update in fp32",
        quantity="fraction of unchanged weights",
        measure=learner_changes.full_precision,
        holds=lambda before, after: before > 0.9 > after,
    ),
    "broken-reward": Change(
        changed="completions graded again",
        quantity="fraction of equal rewards",
        measure=learner_changes.regraded,
        holds=lambda before, after: before < 0.9 < after,
    ),
    "moved-reference": Change(
        changed="the initial policy as the reference",
        quantity="gap to the reference, nats",
        measure=learner_changes.start_as_reference,
        holds=lambda before, after: abs(after) > 5 * abs(before) or abs(after - before) > 1e-3,
    ),
    "samples-too-old": Change(
        changed="score with the recorded weight version",
        quantity="gap to the sampler, nats",
        measure=sampler_changes.own_weights,
        holds=much_smaller,
    ),
    "broken-sampler": Change(
        changed="a separate RNG stream per completion",
        quantity="pairs of equal completions",
        measure=sampler_changes.streams_of_their_own,
        holds=lambda before, after: after < before / 2,
    ),
    "wrong-metric": Change(
        changed="computed from rescored tokens",
        quantity="relative error of kl",
        measure=learner_changes.told_again,
        holds=much_smaller,
    ),
}
"""By cause."""
