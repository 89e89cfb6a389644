"""The one thing to change for each cause, and the quantity that shows it.

Not every cause has one: a prompt that was lost on the way is not in the record, a reward that can
be exploited has no single right form, and prompts that are too hard stay so in a replay. Nor has
every run: rewards that Python code handed over cannot be asked again.
"""

from klinic.probe import learner_changes, sampler_changes
from klinic.probe.proof import Change, much_smaller


def _was_off(before: float, after: float) -> bool:
    return abs(before - 1) > 0.05 and abs(after - 1) < 0.05


PROMISED_GRADIENT = Change(
    changed="the KL term as its name promises",
    quantity="distance from the promised gradient, over the score's",
    measure=learner_changes.right_gradient,
    holds=much_smaller,
)
OWN_MASK = Change(
    changed="the mask from who emitted a token",
    quantity="share of tokens that are masked wrongly",
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
        changed="the temperature",
        quantity="gap, nats",
        measure=sampler_changes.fitted_temperature,
        holds=much_smaller,
    ),
    "wrong-reference": Change(
        changed="the reference is the start",
        quantity="gap to the reference, nats",
        measure=learner_changes.start_as_reference,
        holds=much_smaller,
    ),
    "misaligned-logp": Change(
        changed="log-probs shifted",
        quantity="gap in the rows that are hit, nats",
        measure=sampler_changes.found_shift,
        holds=much_smaller,
    ),
    "retokenised": Change(
        changed="without rows that do not survive",
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
        changed="masked tokens are left out, not multiplied",
        quantity="whether the loss is a number",
        measure=learner_changes.chosen_not_multiplied,
        holds=lambda before, after: before == 0 and after == 1,
    ),
    "hidden-sampling-transform": Change(
        changed="fewer outcomes",
        quantity="gap to the sampler, nats",
        measure=sampler_changes.narrowed,
        holds=much_smaller,
    ),
    "advantage-explodes": Change(
        changed="advantages as the recipe names them",
        quantity="how far a group is from its bound",
        measure=learner_changes.own_advantages,
        holds=much_smaller,
    ),
    "wrong-groups": Change(
        changed="advantages within groups",
        quantity="how far a group is from a sum of 0",
        measure=learner_changes.own_advantages,
        holds=much_smaller,
    ),
    "loss-scaled-wrong": Change(
        changed="divided by the tokens of the whole step",
        quantity="gradient in halves, times the whole",
        measure=learner_changes.cut_otherwise,
        holds=_was_off,
    ),
    "dropout-in-scoring": Change(
        changed="no dropout",
        quantity="scored twice, nats at most",
        measure=learner_changes.no_dropout,
        holds=much_smaller,
    ),
    "layout-changes-logp": Change(
        changed="every row alone",
        quantity="gap to the sampler, nats",
        measure=sampler_changes.rows_alone,
        holds=much_smaller,
    ),
    "step-too-big": Change(
        changed="a tenth of the rate",
        quantity="KL(new || old) of the update before, nats per token",
        measure=learner_changes.smaller_rate,
        holds=much_smaller,
    ),
    "policy-does-not-move": Change(
        changed="the update in fp32",
        quantity="share of the weights that stay",
        measure=learner_changes.full_precision,
        holds=lambda before, after: before > 0.9 > after,
    ),
    "broken-reward": Change(
        changed="completions graded again",
        quantity="share that gets the same reward again",
        measure=learner_changes.regraded,
        holds=lambda before, after: before < 0.9 < after,
    ),
    "moved-reference": Change(
        changed="the reference is the start",
        quantity="gap to the reference, nats",
        measure=learner_changes.start_as_reference,
        holds=lambda before, after: abs(after) > 5 * abs(before) or abs(after - before) > 1e-3,
    ),
    "samples-too-old": Change(
        changed="score with the weights that the tokens name",
        quantity="gap to the sampler, nats",
        measure=sampler_changes.own_weights,
        holds=much_smaller,
    ),
    "broken-sampler": Change(
        changed="streams of their own",
        quantity="pairs of equal completions",
        measure=sampler_changes.streams_of_their_own,
        holds=lambda before, after: after < before / 2,
    ),
    "wrong-metric": Change(
        changed="computed from the tokens, scored again",
        quantity="share by which kl is off",
        measure=learner_changes.told_again,
        holds=much_smaller,
    ),
}
"""By cause."""
