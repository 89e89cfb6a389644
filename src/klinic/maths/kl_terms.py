"""KL terms of the loss, one per estimator name, with their expected gradients.

Write k1 = logp - logp_ref, d = -k1, S = grad logp, w for the importance weight of importance.py, by
default min(exp(logp - logp_sampler), cap), KL_t for the exact KL(policy || reference) at token t.
All expectations are over completions sampled from the policy, terms are summed over tokens, and the
cap is off. In the sequence modes of w, KL_t is weighted by w as well.

"The KL gradient" can mean any of four gradients:

    reverse_sequence  grad KL(policy || ref) of whole completions: sum_t E[S_t sum_{s>=t} k1_s]
    reverse_token     the same without the effect of a token on later ones: sum_t E[k1_t S_t]
    forward_token     grad KL(ref || policy) at the states the policy visits
    forward_sequence  grad KL(ref || policy) of whole completions

    name                 term per token                             expected gradient
    unbiased             sg(w k1) logp                              reverse_token
    exact                KL_t                                       reverse_token
    topk                 KL_t of the top k and a rest bucket        that of a lower bound of KL_t
    sequence             KL_t + sg(w (future KL - baseline)) logp   reverse_sequence
    k1                   k1                                         zero
    k2                   k1^2 / 2                                   reverse_token
    k3                   exp(d) - 1 - d                             forward_token
    k3_plus              value of k3, gradient of k2                reverse_token
    k3_ratio             ratio * k3, the ratio differentiated too   reverse_token
    k3_reversed          exp(k1) - 1 - k1                           half that of chi-square
    abs                  |k1|                                       none; no zero at the reference
    k1_reward            sg(w sum_{s>=t} k1_s) logp                 reverse_sequence
    k1_reward_immediate  sg(w k1) logp, k1 at logp_old              reverse_token
    exp_k1_reward        sg(w sum_s exp(k1_s) k1_s) logp            none

The name fixes where a term enters the loss. Only the weight w is capped: it never changes sign, and
tokens above the cap are counted; no value that carries a gradient is clamped. `klinic verify`
proves every row by enumeration.

Sources: the table of gradients, Y. Tang and R. Munos, "On a few pitfalls in KL divergence gradient
estimation for RL" (2025), arXiv 2506.09477, and K. Liu et al., "Rethinking KL Regularization in
RLHF" (2025), arXiv 2510.01555; k3 in the loss, DeepSeekMath (2024); k3_ratio, DeepSeek-V3.2 (2025),
section 3.1, here with its gradient written out, since in float32 autograd loses it from d = 16 on.
"""

import math
from dataclasses import replace
from typing import Any

from jaxtyping import Float, Int

from klinic.errors import ConfigError
from klinic.maths import kl
from klinic.maths.arrays import (
    array_namespace,
    check_rows,
    dense_ids,
    row_of_token,
    segment_count,
    segment_sum,
    stop_gradient,
    sum_after,
    sum_to_go,
)
from klinic.maths.importance import ImportanceSampling
from klinic.maths.kl_inputs import KLInputs
from klinic.maths.masked import apply_mask
from klinic.maths.score import score_term

Terms = Float[Any, "N"]


def unbiased(inputs: KLInputs) -> Terms:
    """Return sg(w k1) logp: linear tails, no exponential, no dead zone.

    Formula: sg(w k1) logp; the value is w k1.
    Symbols: w, the importance weight of the token; k1 = logp - logp_ref.
    Assumes: off policy, token weights correct actions and not prefixes.
    Source: Tang and Munos (2025); equal per sample to k2 and k3_ratio on policy.

    >>> import numpy as np
    >>> unbiased(KLInputs.on_policy(logp=np.log([0.5]), logp_ref=np.log([0.25]))).round(4)
    array([0.6931])
    """
    coef = inputs.importance_weight * kl.k1(**inputs.policy_and_ref)
    return score_term(coef, logp=inputs.logp, value=coef)


def exact(inputs: KLInputs) -> Terms:
    """Return KL_t, whose autograd gradient is exact: no sampling noise in the action.

    Formula: KL_t = sum_x p(x) (log p(x) - log ref(x)) at token t.
    Symbols: p, the policy over the whole vocabulary, with gradient.
    Assumes: `kl_exact` was computed with `kl.exact` from rows that carry the gradient.
    Source: Amini et al. (2025).

    >>> import numpy as np
    >>> args = dict(logp=np.log([0.5]), logp_ref=np.log([0.25]), kl_exact=np.array([0.1438]))
    >>> exact(KLInputs.on_policy(**args))
    array([0.1438])
    """
    return _weight_prefixes(inputs, _require_computed(inputs.kl_exact, "exact", "kl_exact"))


def topk(inputs: KLInputs) -> Terms:
    """Return KL_t over the top k and a rest bucket: the exact gradient of a lower bound.

    Formula: `kl.topk` at token t.
    Symbols: k, the number of outcomes outside the rest bucket.
    Assumes: `kl_topk` was computed with `kl.topk` from rows that carry the gradient.
    Source: data-processing inequality, see kl.py.

    >>> import numpy as np
    >>> args = dict(logp=np.log([0.5]), logp_ref=np.log([0.25]), kl_topk=np.array([0.1438]))
    >>> topk(KLInputs.on_policy(**args))
    array([0.1438])
    """
    return _weight_prefixes(inputs, _require_computed(inputs.kl_topk, "topk", "kl_topk"))


def sequence(inputs: KLInputs) -> Terms:
    """Return KL_t plus a score-function term for the effect on the KL of later tokens.

    Formula: KL_t + sg(w (F_t - b_t)) logp with F_t = sum over s > t of KL_s.
    Symbols: b_t, the mean F of the other members of the group at position t, 0 after their end.
    Assumes: on policy; off policy token weights do not correct the prefix, and the gradient is
    biased. Exact for sums and constant denominators; a row's own mean would reward length with a
    lower KL.
    Source: Amini et al. (2025), with the baseline of Kool et al. (2019).

    >>> import numpy as np
    >>> args = dict(logp=np.log([0.5]), logp_ref=np.log([0.25]), kl_exact=np.array([0.1438]))
    >>> sequence(KLInputs.on_policy(**args))
    array([0.1438])
    """
    kl_exact = _require_computed(inputs.kl_exact, "sequence", "kl_exact")
    future_kl = sum_after(stop_gradient(kl_exact), inputs.row_offsets)
    baseline = inputs.kl_baseline
    if baseline is None:
        baseline = leave_one_out_baseline(future_kl, inputs.group, inputs.row_offsets)
    coef = inputs.importance_weight * apply_mask(future_kl - baseline, inputs.loss_mask)
    return _weight_prefixes(inputs, kl_exact) + score_term(coef, logp=inputs.logp)


def k1(inputs: KLInputs) -> Terms:
    """Return k1: as a loss its gradient is pure noise, since E[grad logp] is zero.

    Formula: k1.
    Symbols: k1 = logp - logp_ref.
    Assumes: on policy; off policy it pushes away from the sampled tokens.
    Source: Schulman (2020); as a loss, Tang and Munos (2025).

    >>> import numpy as np
    >>> k1(KLInputs.on_policy(logp=np.log([0.5]), logp_ref=np.log([0.25]))).round(4)
    array([0.6931])
    """
    return kl.k1(**inputs.policy_and_ref)


def k2(inputs: KLInputs) -> Terms:
    """Return k1^2 / 2, whose gradient k1 S is that of the KL.

    Formula: k1^2 / 2.
    Symbols: k1 = logp - logp_ref.
    Assumes: on policy.
    Source: Schulman (2020); as a loss, Liu et al. (2025).

    >>> import numpy as np
    >>> k2(KLInputs.on_policy(logp=np.log([0.5]), logp_ref=np.log([0.25]))).round(4)
    array([0.2402])
    """
    return kl.k2(**inputs.policy_and_ref)


def k3(inputs: KLInputs) -> Terms:
    """Return exp(d) - 1 - d: as a loss, the token-level gradient of the forward KL, heavy-tailed.

    Formula: exp(d) - 1 - d.
    Symbols: d = logp_ref - logp.
    Assumes: on policy.
    Source: Schulman (2020); as a loss, DeepSeekMath (2024), eq. 4.

    >>> import numpy as np
    >>> k3(KLInputs.on_policy(logp=np.log([0.5]), logp_ref=np.log([0.25]))).round(4)
    array([0.1931])
    """
    return kl.k3(**inputs.policy_and_ref)


def k3_plus(inputs: KLInputs) -> Terms:
    """Return the value of k3 with the gradient of k2.

    Formula: value k3, gradient k1 S.
    Symbols: k1 = logp - logp_ref.
    Assumes: on policy.
    Source: the straight-through option of verl, `k3+`.

    >>> import numpy as np
    >>> k3_plus(KLInputs.on_policy(logp=np.log([0.5]), logp_ref=np.log([0.25]))).round(4)
    array([0.1931])
    """
    coef = kl.k1(**inputs.policy_and_ref)
    return score_term(coef, logp=inputs.logp, value=kl.k3(**inputs.policy_and_ref))


def k3_ratio(inputs: KLInputs) -> Terms:
    """Return ratio * k3 with the gradient ratio * k1 * S, the sum of its two autograd parts.

    Formula: value r k3, gradient r k1 S.
    Symbols: r = exp(logp - logp_sampler), not capped; k1 = logp - logp_ref.
    Assumes: actions are corrected, prefixes are not.
    Source: DeepSeek-V3.2 (2025), section 3.1.

    >>> import numpy as np
    >>> k3_ratio(KLInputs.on_policy(logp=np.log([0.5]), logp_ref=np.log([0.25]))).round(4)
    array([0.1931])
    """
    uncapped = ImportanceSampling(mode="token_truncate", cap=math.inf)
    ratio = replace(inputs, importance_sampling=uncapped).importance_weight
    coef = ratio * kl.k1(**inputs.policy_and_ref)
    return score_term(coef, logp=inputs.logp, value=ratio * kl.k3(**inputs.policy_and_ref))


def k3_reversed(inputs: KLInputs) -> Terms:
    """Return k3 with policy and reference swapped: chi-square minus the KL, not a KL.

    Formula: exp(k1) - 1 - k1.
    Symbols: k1 = logp - logp_ref.
    Assumes: on policy.
    Source: a common mistake; included to reproduce runs that made it.

    >>> import numpy as np
    >>> k3_reversed(KLInputs.on_policy(logp=np.log([0.5]), logp_ref=np.log([0.25]))).round(4)
    array([0.3069])
    """
    return kl.k3(logp_p=inputs.logp_ref, logp_q=inputs.logp)


def absolute(inputs: KLInputs) -> Terms:
    """Return |k1|, whose gradient sign(k1) S does not vanish near the reference.

    Formula: |k1|.
    Symbols: k1 = logp - logp_ref.
    Assumes: on policy.
    Source: the `abs` option of PPO trainers.

    >>> import numpy as np
    >>> absolute(KLInputs.on_policy(logp=np.log([0.5]), logp_ref=np.log([0.25]))).round(4)
    array([0.6931])
    """
    return kl.absolute(**inputs.policy_and_ref)


def k1_reward(inputs: KLInputs) -> Terms:
    """Return the score-function term with the k1 of this and all later tokens as the cost.

    Formula: sg(w sum over s >= t of k1_s) logp, k1 at logp_old; the value is k1.
    Symbols: w as in `unbiased`.
    Assumes: on policy; not added to the reward before normalisation.
    Source: D. Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019), eq. 2.

    >>> import numpy as np
    >>> k1_reward(KLInputs.on_policy(logp=np.log([0.5]), logp_ref=np.log([0.25]))).round(4)
    array([0.6931])
    """
    cost = sum_to_go(inputs.k1_old, inputs.row_offsets)
    return score_term(inputs.importance_weight * cost, logp=inputs.logp, value=inputs.k1_old)


def k1_reward_immediate(inputs: KLInputs) -> Terms:
    """Return the score-function term with the k1 of this token alone as the cost.

    Formula: sg(w k1) logp, k1 at logp_old.
    Symbols: w as in `unbiased`.
    Assumes: on policy.
    Source: k1 in the reward without discounting into the future.

    >>> import numpy as np
    >>> inputs = KLInputs.on_policy(logp=np.log([0.5]), logp_ref=np.log([0.25]))
    >>> k1_reward_immediate(inputs).round(4)
    array([0.6931])
    """
    return score_term(
        inputs.importance_weight * inputs.k1_old, logp=inputs.logp, value=inputs.k1_old
    )


def exp_k1_reward(inputs: KLInputs) -> Terms:
    """Return the score-function term with exp(k1) k1, summed over the completion, as the cost.

    Formula: sg(w sum over s of exp(k1_s) k1_s) logp, k1 at logp_old.
    Symbols: w as in `unbiased`.
    Assumes: samples of the reference; on samples of the policy it is not a KL.
    Source: tutorials; included to reproduce their runs.

    >>> import numpy as np
    >>> exp_k1_reward(KLInputs.on_policy(logp=np.log([0.5]), logp_ref=np.log([0.25]))).round(4)
    array([1.3863])
    """
    value = array_namespace(inputs.logp).exp(inputs.k1_old) * inputs.k1_old
    row = row_of_token(inputs.row_offsets, len(inputs.logp))
    cost = segment_sum(value, row, len(inputs.group))[row]
    return score_term(inputs.importance_weight * cost, logp=inputs.logp, value=value)


def leave_one_out_baseline(
    values: Float[Any, "N"], group: Int[Any, "B"], row_offsets: Int[Any, "B+1"]
) -> Float[Any, "N"]:
    """Return the mean value of the other group members at each token's position.

    Formula: sum over rows c != b of the group of x_c(t), divided by n - 1.
    Symbols: x_c(t), the value of row c at position t, 0 after its end; n, the size of the group.
    Assumes: members of a group share a prompt, so that the baseline does not depend on the token it
    is subtracted from. A group of one has baseline 0.
    Source: Kool et al. (2019), the leave-one-out baseline.

    >>> import numpy as np
    >>> leave_one_out_baseline(np.array([1.0, 2.0, 5.0]), np.array([0, 0]), np.array([0, 2, 3]))
    array([5., 0., 1.])
    """
    check_rows(row_offsets, values=values)
    xp, row = array_namespace(values), row_of_token(row_offsets, len(values))
    position = xp.arange(len(values), device=values.device) - row_offsets[row]
    # renumber: group ids may be large, and most (group, position) pairs do not occur
    group = dense_ids(group)
    group_position = dense_ids(group[row] * len(values) + position)
    total = segment_sum(values, group_position, len(values))[group_position]
    size = segment_count(group, len(group))
    return (total - values) / (size - 1).clip(min=1)[group[row]]


def _weight_prefixes(inputs: KLInputs, terms: Any) -> Any:
    """Weight terms that sum over all tokens at a prefix: only sequence modes correct prefixes."""
    if not inputs.importance_sampling.by_sequence:
        return terms
    return stop_gradient(inputs.importance_weight) * terms


def _require_computed(values: Any, estimator: str, field: str) -> Any:
    if values is None:
        raise ConfigError(
            f"the KL estimator is {estimator}, but `{field}` was not computed: it needs the "
            "log-probs of the whole vocabulary under policy and reference. Compute it, or use "
            "`unbiased`."
        )
    return values
