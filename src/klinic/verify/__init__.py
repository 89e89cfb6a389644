"""Proofs by enumeration of the value and the gradient of every KL term.

toy_policies.py         toy policies with enumerable completions
targets.py              the gradients that a KL term can have, as exact sums
expectation.py          mean and variance of a term's gradient over all completions
identify.py             matches an expected gradient with a target
estimators.py           measurements of each estimator
world_range.py          the same over many random worlds
correction.py           each mode of importance weights on completions of an older policy
identities.py           identities that klinic's terms must satisfy, each with its error
identity_check.py       one of them
teacher.py              the KL term to a teacher, in the loss of a training step
coefficient_meaning.py  effect of aggregation and advantage scaling on the KL coefficient
proof.py                the complete result of `klinic verify`
extremes.py             where a term overflows, cancels or has no gradient
function.py             measurements of a user's own KL function
user_worlds.py          toy worlds for a user's function
known_values.py         the quantity that a mean value estimates
row_pulls.py            a function's pull on each token of chosen rows
gradient_range.py       where a user's function leaves its identified gradient
row_structure.py        whether the gradient holds on longer rows and in other batches
vocabulary.py           functions of logits at vocabularies of up to 151,936 tokens
sampled_row.py          functions of logits and sampled tokens at a row of rare tokens
off_policy.py           which importance sampling a function does
ratio_range.py          where its weight leaves the ratio of policy to sampler
own_length.py           effect of a mean over each completion's own length
advice.py               verdict and advice for a user's function
limits.py               sentences about where its gradient ends
recommendation.py       sentences about the action to take, with code
loading.py              imports and calls a user's function
monte_carlo.py          direction of k3 by sampling, on policy and off
"""
