"""A coefficient on the gradient of a log-prob.

Policy-gradient terms are sums of c_t * grad log p_t with a coefficient c_t that is a number, not a
function of the weights. Written naively as c * logp, the loss shows a meaningless value, and a
forgotten stop-gradient on c goes unnoticed. This is the only place where such a term is made.
"""

from typing import Any

from jaxtyping import Float

from klinic.maths.arrays import stop_gradient


def score(
    coef: Float[Any, "N"], *, logp: Float[Any, "N"], value: Float[Any, "N"] | float = 0.0
) -> Float[Any, "N"]:
    """Return a term that shows `value` and has the gradient coef * grad logp.

    Formula: sg(value) + sg(coef) * (logp - sg(logp)), with sg the stop-gradient.
    Symbols: coef, a number per token; logp, the log-prob of the token, with gradient; value, what
    the term adds to the number that people read.
    Assumes: coef is finite; an infinite one makes the value NaN, which is then seen.
    Source: R. Williams, "Simple statistical gradient-following algorithms" (1992), the score
    function estimator.

    >>> import numpy as np
    >>> score(np.array([3.0]), logp=np.log([0.5]), value=np.array([0.25]))
    array([0.25])
    """
    return stop_gradient(value) + stop_gradient(coef) * (logp - stop_gradient(logp))
