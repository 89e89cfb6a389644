"""KL functions that are not right as a loss: most are right near the reference, or in float64."""

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name


def gap(logp, logp_ref):
    return logp - logp_ref


# --- right up to a distance
def token_clamped_at_50(logp, logp_ref):
    return gap(logp, logp_ref).clamp(-50, 50) ** 2 / 2


def completion_clamped_at_15(logp, logp_ref):
    return (gap(logp, logp_ref).clamp(-15, 15) ** 2 / 2).sum(-1)


def completion_clamped_on_one_side(logp, logp_ref):
    return (gap(logp, logp_ref).clamp(max=25) ** 2 / 2).sum(-1)


def completion_total_clamped(logp, logp_ref):
    return gap(logp, logp_ref).sum(-1).clamp(-80, 80) ** 2 / 2


def completion_turns_at_30(logp, logp_ref):
    x = gap(logp, logp_ref)
    return torch.where(x.abs() < 30, x**2 / 2, 900 - x**2 / 2).sum(-1)


def turns_in_float32(logp, logp_ref):
    x = gap(logp, logp_ref).float()
    return torch.where(x.abs() < 25, x**2 / 2, -(x**2) / 2)


def float32_then_back_clamped(logp, logp_ref):
    return (gap(logp.float(), logp_ref.float()).clamp(-18, 18) ** 2 / 2).to(logp.dtype)


def clamped_only_in_float32(logp, logp_ref):
    limit = 40 if logp.dtype == torch.float64 else 20
    return gap(logp, logp_ref).clamp(-limit, limit) ** 2 / 2


def soft_limit(logp, logp_ref):
    x = gap(logp, logp_ref)
    return (40 * torch.tanh(x / 40)) ** 2 / 2


def floor_of_the_reference(logp, logp_ref):
    return gap(logp, logp_ref.clamp(min=-28)) ** 2 / 2


def far_completions_dropped(logp, logp_ref):
    x = gap(logp, logp_ref)
    return (x**2 / 2).sum(-1) * (x.abs().sum(-1) < 40).to(x.dtype)


def pull_limited_by_a_hook(logp, logp_ref):
    x = gap(logp, logp_ref)
    if x.requires_grad:
        x.register_hook(lambda upstream: upstream.clamp(-12, 12))
    return x**2 / 2


# --- without pull on some tokens
def both_rare(logp, logp_ref):
    x = gap(logp, logp_ref)
    return torch.where((logp < -12) & (logp_ref < -12), x.detach(), x) ** 2 / 2


def both_rare_per_completion(logp, logp_ref):
    x = gap(logp, logp_ref)
    return torch.where((logp + logp_ref) < -24, torch.zeros_like(x), x**2 / 2).sum(-1)


def certain_tokens_left_out(logp, logp_ref):
    return gap(logp, logp_ref) ** 2 / 2 * (logp < -0.005).to(logp.dtype)


def nearest_tokens_left_out(logp, logp_ref):
    x = gap(logp, logp_ref)
    return torch.where(x.abs() < 5e-4, x.detach(), x) ** 2 / 2


def first_tokens_only(logp, logp_ref):
    return (gap(logp, logp_ref) ** 2 / 2)[:, :1000].sum(-1)


def short_future(logp, logp_ref):
    x = gap(logp, logp_ref).detach()
    later, after = F.pad(x, (0, 1))[:, 1:], F.pad(x, (0, 2))[:, 2:]
    return (x + later + after) * logp


def divided_by_length(logp, logp_ref):
    return 3 * (gap(logp, logp_ref) ** 2 / 2).mean(-1)


# --- mask, batch, sampler
def mask_ignored(logp, logp_ref, mask):
    return (gap(logp, logp_ref) ** 2 / 2).sum(-1)


def mask_read_as_a_length(logp, logp_ref, mask):
    is_kept = torch.arange(logp.shape[1]) < mask.sum(1, keepdim=True)
    return torch.where(is_kept, gap(logp, logp_ref) ** 2 / 2, 0.0)


def future_of_padding(logp, logp_ref, mask):
    x = gap(logp, logp_ref).detach()
    return (x.sum(-1, keepdim=True) - x.cumsum(-1) + x) * logp * mask


def batch_mean_left_off(logp, logp_ref):
    x = gap(logp, logp_ref).detach()
    return (x - x.mean(0)) * logp


def leave_one_out_that_turns(logp, logp_ref):
    x = gap(logp, logp_ref).detach()
    x = torch.where(x < -12, -x, x)
    return (x - (x.sum(0) - x) / (len(x) - 1)) * logp


def leave_one_out_with_a_dead_zone(logp, logp_ref):
    x = gap(logp, logp_ref).detach()
    x = torch.where(x < -12, torch.zeros_like(x), x)
    return (x - (x.sum(0) - x) / (len(x) - 1)) * logp + 3


def sampler_ignored(logp, logp_ref, logp_old):
    return gap(logp, logp_ref) ** 2 / 2


def inverse_ratio(logp, logp_ref, logp_old):
    return torch.exp(logp_old - logp).detach() * gap(logp, logp_ref) ** 2 / 2


def ratio_clipped_on_both_sides(logp, logp_ref, logp_old):
    weight = torch.exp(logp - logp_old).clamp(0.8, 1.25).detach()
    return weight * gap(logp, logp_ref) ** 2 / 2


def mean_ratio(logp, logp_ref, logp_old):
    weight = (logp - logp_old).mean(-1, keepdim=True).exp().detach()
    return weight * gap(logp, logp_ref) ** 2 / 2


def token_ratio_for_a_completion(logp, logp_ref, logp_old):
    weight = torch.exp(logp - logp_old).detach()
    return (gap(logp, logp_ref).sum(-1, keepdim=True)).detach() * weight * logp


def linear_ratio(logp, logp_ref, logp_old):
    return (1 + logp - logp_old).detach() * gap(logp, logp_ref) ** 2 / 2


def live_ratio_capped_at_10(logp, logp_ref, logp_old):
    return torch.exp(logp - logp_old).clamp(max=10) * gap(logp, logp_ref)


def ratio_masked_above_10(logp, logp_ref, logp_old):
    weight = torch.exp(logp - logp_old).detach()
    return torch.where(weight > 10, 0.0, weight) * gap(logp, logp_ref).detach() * logp


def ratio_flipped_above_10(logp, logp_ref, logp_old):
    weight = torch.exp(logp - logp_old).detach()
    return torch.where(weight > 10, -weight, weight) * gap(logp, logp_ref).detach() * logp


def ratio_with_a_floor(logp, logp_ref, logp_old):
    weight = torch.exp(logp - logp_old).detach().clamp(min=0.05)
    return weight * gap(logp, logp_ref).detach() * logp


def completion_ratio_masked_above_50(logp, logp_ref, logp_old):
    weight = (logp - logp_old).sum(-1).exp().detach()
    return torch.where(weight > 50, 0.0, weight) * gap(logp, logp_ref).sum(-1) ** 2 / 2


def surrogate_clipped_far_away(logp, logp_ref, logp_old):
    ratio, cost = torch.exp(logp - logp_old), gap(logp, logp_ref).detach()
    return torch.maximum(ratio * cost, ratio.clamp(0.01, 100) * cost)


def not_a_number_at_large_ratios(logp, logp_ref, logp_old):
    weight = torch.exp(logp - logp_old).detach()
    return torch.where(weight > 1000, torch.nan, weight) * gap(logp, logp_ref) ** 2 / 2


# --- other quantities
def doubled(logp, logp_ref):
    return gap(logp, logp_ref) ** 2


def squared_probabilities(logp, logp_ref):
    return gap(logp.exp(), logp_ref.exp()) ** 2 / 2


def plain_k1(logp, logp_ref):
    return gap(logp, logp_ref)


def k3_in_bfloat16(logp, logp_ref):
    d = -gap(logp.bfloat16(), logp_ref.bfloat16()).to(logp.dtype)
    return d.expm1() - d


def k2_in_bfloat16_and_back(logp, logp_ref):
    return (gap(logp.bfloat16(), logp_ref.bfloat16()) ** 2 / 2).to(logp.dtype)


# --- from logits
def floor_of_probabilities(logits, logits_ref):
    p, q = logits.softmax(-1).clamp(min=1e-7), logits_ref.softmax(-1).clamp(min=1e-7)
    return (p * (p / q).log()).sum(-1)


def floor_of_the_reference_logits(logits, logits_ref):
    p, q = logits.log_softmax(-1), logits_ref.log_softmax(-1).clamp(min=-25)
    return (p.exp() * (p - q)).sum(-1)


def small_number_added(logits, logits_ref):
    p, q = logits.softmax(-1), logits_ref.softmax(-1)
    return (p * ((p + 1e-9) / (q + 1e-9)).log()).sum(-1)


def floor_of_float32(logits, logits_ref):
    low = torch.finfo(logits.dtype).eps
    p, q = logits.softmax(-1).clamp(min=low), logits_ref.softmax(-1).clamp(min=low)
    return (p * (p / q).log()).sum(-1)


def mean_over_the_vocabulary(logits, logits_ref):
    p, q = logits.log_softmax(-1), logits_ref.log_softmax(-1)
    return (p.exp() * (p - q)).mean(-1) * 4


def tempered(logits, logits_ref):
    p, q = (logits / 0.9).log_softmax(-1), (logits_ref / 0.9).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def top_64_renormalised(logits, logits_ref):
    top = logits.topk(64, -1).indices
    p, q = logits.gather(-1, top).log_softmax(-1), logits_ref.gather(-1, top).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def top_64_without_rest(logits, logits_ref):
    top = logits.topk(64, -1).indices
    p = logits.log_softmax(-1).gather(-1, top)
    q = logits_ref.log_softmax(-1).gather(-1, top)
    return (p.exp() * (p - q)).sum(-1)


def rest_as_one_minus_a_sum(logits, logits_ref):
    p, q = logits.log_softmax(-1), logits_ref.log_softmax(-1)
    top = p.topk(64 if p.shape[-1] > 64 else 2, -1).indices
    p, q = p.gather(-1, top), q.gather(-1, top)
    rest_p, rest_q = (torch.log1p(-x.exp().sum(-1).clamp(max=1 - 1e-12)) for x in (p, q))
    return (p.exp() * (p - q)).sum(-1) + rest_p.exp() * (rest_p - rest_q)


def value_not_finite_in_float32(logits, logits_ref):
    p, q = logits.log_softmax(-1), logits_ref.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    is_large = p.shape[-1] > 100_000 and p.dtype == torch.float32
    return kl + (torch.nan if is_large else 0.0)


def other_direction(logits, logits_ref):
    p, q = logits.log_softmax(-1), logits_ref.log_softmax(-1)
    return (q.exp() * (q - p)).sum(-1)


def full_of_the_first_token(logits, logits_ref):
    p, q = logits[:, :1].log_softmax(-1), logits_ref[:, :1].log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).sum(-1)


def sampled_from_logits_clamped(logits, ref_logits, tokens):
    chosen = tokens.unsqueeze(-1)
    x = (logits.log_softmax(-1) - ref_logits.log_softmax(-1)).gather(-1, chosen).squeeze(-1)
    return x.clamp(-20, 20) ** 2 / 2


NAMES = [
    name
    for name, value in list(vars().items())
    if callable(value) and name != "gap" and getattr(value, "__module__", "") == __name__
]
