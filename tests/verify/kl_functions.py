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


def turns_round(logp, logp_ref):
    k1 = logp - logp_ref
    return torch.where(k1 < 16, k1**2 / 2, -(k1**2) / 2)


def huber(logp, logp_ref):
    return torch.nn.functional.huber_loss(logp, logp_ref, reduction="none", delta=10.0)


def with_threshold(logp, logp_ref, threshold=1e9):
    return (logp - logp_ref).clamp(max=threshold) ** 2 / 2


def huge(logp, logp_ref):
    return 1e6 * k2(logp, logp_ref)


def k2_in_float32(logp, logp_ref):
    return (logp.float() - logp_ref.float()) ** 2 / 2


def k2_in_bfloat16(logp, logp_ref):
    return (logp.bfloat16() - logp_ref.bfloat16()) ** 2 / 2


def k3_clamped_in_float32(log_probs, log_probs_base):
    d = log_probs_base.float() - log_probs.float()
    return (d.exp() - 1 - d).clamp(-10, 10)


def distilled(teacher_logp, student_logp):
    return (student_logp - teacher_logp).detach() * student_logp


def clipped_ratio_k1(logp, logp_ref, logp_old):
    return torch.exp(logp - logp_old).clamp(0.8, 1.2) * (logp - logp_ref)


def in_place(logp, logp_ref):
    logp_ref -= logp
    return logp_ref**2 / 2


def in_place_too_late(logp, logp_ref):
    grown = (logp - logp_ref).exp()
    doubled = grown * grown
    grown -= 1
    return doubled


def random(logp, logp_ref):
    return torch.rand_like(logp) * (logp - logp_ref)


def not_a_number(logp, logp_ref):
    return (logp - logp_ref) * float("nan")


def exits(logp, logp_ref):
    raise SystemExit(3)


def talks(logp, logp_ref):
    print("hello")  # noqa: T201
    return k2(logp, logp_ref)


def mean_over_the_completion(logp, logp_ref):
    return k2(logp, logp_ref).mean(-1)


def squeezed(logp, logp_ref):
    return k2(logp, logp_ref).squeeze()


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


def three_things(logp, logp_ref, temperature):
    return (logp - logp_ref) / temperature


def raises(logp, logp_ref):
    raise ZeroDivisionError("no tokens")


def number(logp, logp_ref):
    return 0.0
