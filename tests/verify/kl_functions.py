"""KL functions as people write them, to be told apart by `klinic verify module:function`."""

import torch


def k1(policy_log_probs, ref_log_probs):
    return policy_log_probs - ref_log_probs


def k2(logp, logp_ref):
    return 0.5 * (logp - logp_ref) ** 2


def k3(per_token_logps, ref_per_token_logps):
    d = ref_per_token_logps - per_token_logps
    return torch.exp(d) - d - 1


def k3_from_the_reference_first(ref_logp, logp):
    return k3(logp, ref_logp)


def k3_reversed(logp, logp_ref):
    return k3(logp_ref, logp)


def exp_k1_k1(log_probs, ref_log_probs):
    return (log_probs - ref_log_probs).exp() * (log_probs - ref_log_probs)


def exp_k1_k1_summed(log_probs, ref_log_probs):
    return exp_k1_k1(log_probs, ref_log_probs).sum(dim=-1)


def absolute(logp, logp_ref):
    return (logp - logp_ref).abs()


def k3_clamped(logp, logp_ref):
    return k3(logp, logp_ref).clamp(max=10)


def k3_clamped_far_away(logp, logp_ref):
    return k3(logp, logp_ref).clamp(max=1e6)


def ratio_k3(logp, logp_ref, logp_old):
    return torch.exp(logp - logp_old) * k3(logp, logp_ref)


def detached_ratio_k3(logp, logp_ref, logp_old=None):
    ratio = 1.0 if logp_old is None else torch.exp(logp - logp_old).detach()
    return ratio * k3(logp, logp_ref)


def wrong_sign(logp, logp_ref):
    return -k2(logp, logp_ref)


def twice(logp, logp_ref):
    return (logp - logp_ref) ** 2


def detached(logp, logp_ref):
    return k3(logp, logp_ref).detach()


def exact(logits, ref_logits):
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def forward(logits, ref_logits):
    return exact(ref_logits, logits)


def squared_sum(*, logp, logp_ref):
    return (logp - logp_ref).sum(-1) ** 2 / 2


def mean(logp, logp_ref):
    return (logp - logp_ref).mean()


def three_things(logp, logp_ref, mask):
    return (logp - logp_ref) * mask


def raises(logp, logp_ref):
    raise ZeroDivisionError("no tokens")


def number(logp, logp_ref):
    return 0.0
