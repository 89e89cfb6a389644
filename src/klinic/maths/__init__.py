"""The formulas, each written once, for NumPy arrays and torch tensors alike.

    kl.py             how far apart two policies are: values, from samples or exactly
    kl_gradient.py    the KL term of the loss: what each estimator differentiates
    kl_estimators.py  their names, and the gradient each name promises
    kl_inputs.py      what such a term may see
    kl_coef.py        rules that move the coefficient of that term
    ratio.py          importance ratios, clipping, truncated weights, effective sample size
    advantage.py      rewards of a group turned into advantages
    surrogate.py      the policy term of the loss
    masked.py         reductions over flat tokens
    score.py          the one way to put a coefficient on the gradient of a log-prob
    arrays.py         the operations NumPy and torch spell differently

Tokens of all rows lie end to end: `N` tokens, `B` rows, and row b owns the tokens
`row_offsets[b]` to `row_offsets[b + 1]`. Position t holds the log-prob of token t. KL is in nats.
"""
