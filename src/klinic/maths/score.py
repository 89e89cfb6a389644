"""Score-function terms: a constant coefficient on the gradient of a log-prob.

Policy-gradient terms are sums of c_t * grad log p_t with a coefficient c_t that is constant in the
weights. As a plain c * logp the loss has a meaningless value, and a missing stop-gradient on c goes
unnoticed. All such terms are built here.
"""

from typing import Any

from jaxtyping import Float

from klinic.maths.arrays import stop_gradient


def score_term(
    coef: Float[Any, "N"], *, logp: Float[Any, "N"], value: Float[Any, "N"] | float = 0.0
) -> Float[Any, "N"]:
    """Return a term with the value `value` and the gradient coef * grad logp.

    Formula: sg(value) + sg(coef) * (logp - sg(logp)), with sg the stop-gradient.
    Symbols: coef, a number per token; logp, the log-prob of the token, with gradient; value, the
    contribution to the reported loss.
    Assumes: coef is finite; an infinite one makes the value NaN, which the guards detect.
    Source: R. Williams, "Simple statistical gradient-following algorithms" (1992), the score
    function estimator.

    >>> import numpy as np
    >>> score_term(np.array([3.0]), logp=np.log([0.5]), value=np.array([0.25]))
    array([0.25])
    """
    return stop_gradient(value) + stop_gradient(coef) * (logp - stop_gradient(logp))
