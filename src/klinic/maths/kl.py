"""Values of KL(p || q) between two policies, from samples of p or exact.

Write d = log q(x) - log p(x) for a token x that was sampled from p. Then

    name      value            E[value]                         always >= 0
    k1        -d               KL(p || q)                       no
    k2        d^2 / 2          KL(p || q) + O(d^3)              yes
    k3        exp(d) - 1 - d   KL(p || q)                       yes
    absolute  |d|              not a KL: first order in d       yes

and over whole rows of log-probs, without sampling,

    exact     sum_x p (log p - log q)                           yes, up to rounding
    topk      exact, over the k likeliest tokens of p and one bucket for the rest; never above exact

These are values; `kl_terms.py` lists the gradient each has when used as a loss. Arguments are
keyword-only, so that the direction is visible at the call: for tokens sampled from the policy,
KL(policy || reference) is `logp_p=logp, logp_q=logp_ref`.

Sources: k1, k2, k3: J. Schulman, "Approximating KL Divergence" (2020),
http://joschu.net/blog/kl-approx.html; exact: A. Amini et al., "Better Estimation of the KL
Divergence Between Language Models" (2025), arXiv 2504.10637; topk: the log-sum inequality, T. Cover
and J. Thomas, "Elements of Information Theory", theorem 2.7.1.
"""

import math
from typing import Any

from jaxtyping import Float, Int

from klinic.errors import ConfigError
from klinic.maths.arrays import array_namespace, fill_last, logsumexp, take_last, top_k_indices

LogProbs = Float[Any, "*shape"]
LogProbRows = Float[Any, "*shape V"]


def k1(*, logp_p: LogProbs, logp_q: LogProbs) -> LogProbs:
    """Return -d: unbiased, negative on many tokens, noisy near p = q.

    Formula: log p(x) - log q(x).
    Symbols: logp_p, logp_q, the log-probs of one sampled token under p and q.
    Assumes: tokens sampled from p.
    Source: Schulman (2020), k1.

    >>> import numpy as np
    >>> k1(logp_p=np.log([0.5]), logp_q=np.log([0.25])).round(4)
    array([0.6931])
    """
    return logp_p - logp_q


def k2(*, logp_p: LogProbs, logp_q: LogProbs) -> LogProbs:
    """Return d^2 / 2: never negative, low noise, and biased once d is not small.

    Formula: (log p(x) - log q(x))^2 / 2.
    Symbols: logp_p, logp_q, the log-probs of one sampled token under p and q.
    Assumes: tokens sampled from p; |d| small for the value to be near the KL.
    Source: Schulman (2020), k2.

    >>> import numpy as np
    >>> k2(logp_p=np.log([0.5]), logp_q=np.log([0.25])).round(4)
    array([0.2402])
    """
    return (logp_p - logp_q) ** 2 / 2


def k3(*, logp_p: LogProbs, logp_q: LogProbs) -> LogProbs:
    """Return exp(d) - 1 - d: unbiased and never negative.

    Formula: exp(d) - 1 - d with d = log q(x) - log p(x).
    Symbols: logp_p, logp_q, the log-probs of one sampled token under p and q.
    Assumes: tokens sampled from p. Its variance contains chi-square(q || p): low near p = q, and
    unbounded where q favours tokens to which p gives almost no probability.
    Source: Schulman (2020), k3.

    >>> import numpy as np
    >>> k3(logp_p=np.log([0.5]), logp_q=np.log([0.25])).round(4)
    array([0.1931])
    """
    d = logp_q - logp_p
    return array_namespace(d).expm1(d) - d  # expm1: exp(d) - 1 loses every digit when |d| is small


def absolute(*, logp_p: LogProbs, logp_q: LogProbs) -> LogProbs:
    """Return |d|: a distance, and no estimate of the KL.

    Formula: |log p(x) - log q(x)|.
    Symbols: logp_p, logp_q, the log-probs of one sampled token under p and q.
    Assumes: tokens sampled from p.
    Source: the `abs` option of PPO trainers; included to reproduce their metrics.

    >>> import numpy as np
    >>> absolute(logp_p=np.log([0.5]), logp_q=np.log([0.25])).round(4)
    array([0.6931])
    """
    return abs(logp_p - logp_q)


def exact(*, logp_p: LogProbRows, logp_q: LogProbRows) -> LogProbs:
    """Return KL(p || q) summed over the whole last axis: no sampling noise at all.

    Formula: sum_x p(x) (log p(x) - log q(x)).
    Symbols: logp_p, logp_q, normalised log-probs of every outcome; -inf where p(x) = 0.
    Assumes: rows are normalised. Where p(x) is 0, or underflows, the outcome adds 0 for every q;
    where only q(x) = 0 the KL is infinite, and so is the result.
    Source: Amini et al. (2025), the Rao-Blackwell estimator.

    >>> import numpy as np
    >>> exact(logp_p=np.log([0.5, 0.5]), logp_q=np.log([0.25, 0.75])).round(4)
    np.float64(0.1438)
    """
    xp = array_namespace(logp_p)
    p = xp.exp(logp_p)
    is_possible = p > 0  # elsewhere -inf minus -inf, or 0 times inf, would be NaN
    log_ratio = xp.where(is_possible, logp_p, 0.0) - xp.where(is_possible, logp_q, 0.0)
    return (p * log_ratio).sum(-1)


def coarse_logp(*, logp: LogProbRows, token_ids: Int[Any, "*shape K"]) -> Float[Any, "*shape K+1"]:
    """Return the log-probs of K outcomes and, last, of the remaining ones together.

    Formula: (log p(a_1), ..., log p(a_K), log sum_{x not in a} p(x)).
    Symbols: logp, normalised log-probs of every outcome; token_ids, the K distinct outcomes a.
    Assumes: token_ids are distinct. The rest is a sum, not 1 minus the K outcomes: that would
    cancel when the rest is small.
    Source: Cover and Thomas, theorem 2.7.1: grouping outcomes never raises a KL.

    >>> import numpy as np
    >>> np.exp(coarse_logp(logp=np.log([0.5, 0.2, 0.3]), token_ids=np.array([0]))).round(4)
    array([0.5, 0.5])
    """
    xp = array_namespace(logp)
    remaining_logp = fill_last(logp, token_ids, -math.inf)
    is_empty = (remaining_logp == -math.inf).all(-1)  # the gradient of logsumexp is NaN there
    rest = logsumexp(xp.where(is_empty[..., None], 0.0, remaining_logp))
    rest = xp.where(is_empty, -math.inf, rest)
    return xp.concatenate([take_last(logp, token_ids), rest[..., None]], -1)


def topk(*, logp_p: LogProbRows, logp_q: LogProbRows, k: int) -> LogProbs:
    """Return the KL over the k likeliest outcomes of p and one bucket for the rest.

    Formula: exact KL between coarse(p) and coarse(q), outcomes a = the k largest p(x).
    Symbols: logp_p, logp_q, normalised log-probs of every outcome; k, outcomes outside the bucket.
    Assumes: 1 <= k < number of outcomes. A lower bound of the exact KL, with value and gradient 0
    at p = q. Dropping the rest instead of bucketing it has neither property.
    Source: Cover and Thomas, theorem 2.7.1.

    >>> import numpy as np
    >>> topk(logp_p=np.log([0.5, 0.2, 0.3]), logp_q=np.log([0.25, 0.5, 0.25]), k=1).round(4)
    np.float64(0.1438)
    """
    if not 1 <= k < logp_p.shape[-1]:
        raise ConfigError(
            f"k is {k} of {logp_p.shape[-1]} outcomes: at least one must be outside and at least "
            "one inside the rest bucket. Use the exact KL to keep all outcomes."
        )
    top_ids = top_k_indices(logp_p, k)
    coarse_q = coarse_logp(logp=logp_q, token_ids=top_ids)
    return bucketed_kl(logp_p=logp_p, coarse_q=coarse_q, token_ids=top_ids)


def bucketed_kl(
    *, logp_p: LogProbRows, token_ids: Int[Any, "*shape K"], coarse_q: Float[Any, "*shape K+1"]
) -> LogProbs:
    """Return the KL over K outcomes and one bucket for the rest, for a q stored in that form.

    Formula: exact KL between coarse(p) and coarse(q), for any outcomes a.
    Symbols: logp_p, normalised log-probs of every outcome; coarse_q, `coarse_logp` of q;
    token_ids, the outcomes a.
    Assumes: token_ids are distinct, and those of coarse_q. A lower bound of the exact KL, with
    value and gradient 0 at p = q for any outcomes; the likelier they are under p, the tighter.
    Source: Cover and Thomas, theorem 2.7.1.

    >>> import numpy as np
    >>> first = np.array([0])
    >>> coarse_q = coarse_logp(logp=np.log([0.25, 0.5, 0.25]), token_ids=first)
    >>> bucketed_kl(logp_p=np.log([0.5, 0.2, 0.3]), coarse_q=coarse_q, token_ids=first).round(4)
    np.float64(0.1438)
    """
    return exact(logp_p=coarse_logp(logp=logp_p, token_ids=token_ids), logp_q=coarse_q)
