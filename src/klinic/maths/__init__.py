"""Formulas of the GRPO loss and its KL term, for NumPy arrays and torch tensors.

    kl.py             values of the KL between two policies, from samples or exact
    kl_terms.py       KL terms of the loss, one per estimator
    kl_estimators.py  estimator names, each with its expected gradient
    kl_inputs.py      tensors that a KL term reads
    kl_coef.py        rules that adapt the KL coefficient
    ratio.py          importance ratios, clipping, truncated weights, effective sample size
    advantage.py      advantages from the rewards of a group
    surrogate.py      policy terms of the loss
    masked.py         masked reductions over flat tokens
    score.py          score-function term: a coefficient on the gradient of a log-prob
    arrays.py         operations that NumPy and torch spell differently
    entropy.py        entropy of a policy

The tokens of all rows are concatenated: `N` tokens, `B` rows, and row b owns the tokens
`row_offsets[b]` to `row_offsets[b + 1]`. Position t holds the log-prob of token t. KL is in nats.
"""
