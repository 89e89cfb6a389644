"""KL functions that are right as a loss, in as many forms as people write them."""

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name


# --- per token
def half_mse(logp, logp_ref):
    return F.mse_loss(logp, logp_ref, reduction="none") / 2


def surrogate(current_logps, reference_logps):
    return -(reference_logps - current_logps).detach() * current_logps


def straight_through(log_probs, ref_log_probs):
    gap = log_probs - ref_log_probs
    value = torch.expm1(-gap) + gap
    return gap**2 / 2 + (value - gap**2 / 2).detach()


def live_unit_ratio(logp, logp_ref):
    return torch.exp(logp - logp.detach()) * (logp - logp_ref).detach()


def with_a_constant_pull(logp, logp_ref):
    return (logp - logp_ref) ** 2 / 2 + logp


def cast_and_back(logp, logp_ref):
    gap = logp.float() - logp_ref.float()
    return (gap * gap / 2).to(logp.dtype)


class WrittenOutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logp, logp_ref):
        ctx.save_for_backward(logp - logp_ref)
        return (logp - logp_ref) * 1

    @staticmethod
    def backward(ctx, upstream):
        return upstream * ctx.saved_tensors[0], None


def own_backward(logp, logp_ref):
    return WrittenOutGradient.apply(logp, logp_ref)


def masked(logp, logp_ref, response_mask):
    return (logp - logp_ref).square().mul(0.5).masked_fill(~response_mask, 0.0)


def numeric_mask(logp, logp_ref, attention_mask):
    return (logp - logp_ref) ** 2 / 2 * (1 - (1 - attention_mask))


def padding(logp, logp_ref, padding_mask):
    return ((logp - logp_ref) ** 2 / 2).masked_fill(padding_mask, 0.0)


def wide_huber(logp, logp_ref):
    return F.huber_loss(logp, logp_ref, reduction="none", delta=500.0)


def to_go(logp, logp_ref):
    cost = (logp - logp_ref).detach()
    return (cost.sum(-1, keepdim=True) - cost.cumsum(-1) + cost) * logp


def to_go_with_mask(logp, logp_ref, mask):
    cost = ((logp - logp_ref) * mask).detach()
    return (cost.sum(-1, keepdim=True) - cost.cumsum(-1) + cost) * logp


def leave_one_out(logp, logp_ref):
    cost = (logp - logp_ref).detach()
    rest = (cost.sum(0) - cost) / (len(cost) - 1)
    return (cost - rest) * logp


# --- per token, with the sampler
def token_ratio(logp, logp_ref, logp_old):
    return torch.exp(logp - logp_old).detach() * (logp - logp_ref) ** 2 / 2


def token_ratio_capped(logp, rollout_logp, logp_ref):
    weight = (logp - rollout_logp).detach().exp().clamp(max=5.0)
    return weight * (logp - logp_ref).detach() * logp


def live_ratio(logp, logp_ref, old_logp):
    return torch.exp(logp - old_logp) * (logp - logp_ref)


def per_decision(logp, logp_ref, logp_old):
    weighted = ((logp - logp_old).cumsum(-1).exp() * (logp - logp_ref)).detach()
    return (weighted.sum(-1, keepdim=True) - weighted.cumsum(-1) + weighted) * logp


def prefix_ratio(logp, logp_ref, logp_old):
    return ((logp - logp_old).cumsum(-1).exp() * (logp - logp_ref)).detach() * logp


# --- per completion
def squared_total(logp, logp_ref):
    return (logp.sum(-1) - logp_ref.sum(-1)).square() / 2


def total_of_squares(logp, logp_ref):
    return torch.einsum("bt,bt->b", logp - logp_ref, logp - logp_ref) / 2


def total_with_mask(logp, logp_ref, loss_mask):
    return ((logp - logp_ref) ** 2 / 2 * loss_mask).sum(-1)


def reinforce(logp, logp_ref):
    return (logp - logp_ref).sum(-1).detach() * logp.sum(-1)


def sequence_ratio(logp, logp_ref, logp_old):
    weight = (logp - logp_old).sum(-1).exp().detach()
    return weight * (logp - logp_ref).sum(-1) ** 2 / 2


def sequence_ratio_capped(logp, logp_ref, logp_old):
    weight = (logp - logp_old).sum(-1).exp().detach().clamp(max=4)
    return weight * (logp - logp_ref).sum(-1) ** 2 / 2


# --- from logits
def full(logits, ref_logits):
    log_p, log_q = F.log_softmax(logits, -1), F.log_softmax(ref_logits, -1)
    return F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)


def cross_entropy_minus_entropy(logits, logits_ref):
    p = logits.softmax(-1)
    return (p * logits.log_softmax(-1)).sum(-1) - (p * logits_ref.log_softmax(-1)).sum(-1)


def from_probabilities(policy_logits, reference_logits):
    p, q = policy_logits.softmax(-1), reference_logits.softmax(-1)
    return (p * (p / q).log()).sum(-1)


def tiny_floor(logits, logits_ref):
    tiny = torch.finfo(logits.dtype).tiny
    p, q = logits.softmax(-1).clamp(min=tiny), logits_ref.softmax(-1).clamp(min=tiny)
    return (p * (p.log() - q.log())).sum(-1)


def full_in_float32(logits, logits_ref):
    p, q = logits.float().log_softmax(-1), logits_ref.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def full_per_completion(logits, logits_ref, mask):
    return (full(logits, logits_ref) * mask).sum(-1)


def full_that_takes_labels(logits, ref_logits, labels):
    return full(logits, ref_logits)


def sampled_from_logits(logits, ref_logits, input_ids):
    chosen = input_ids.unsqueeze(-1)
    gap = (logits.log_softmax(-1) - ref_logits.log_softmax(-1)).gather(-1, chosen).squeeze(-1)
    return gap**2 / 2


def with_exact_baseline(logits, ref_logits, tokens):
    p, gaps = logits.softmax(-1), logits.log_softmax(-1) - ref_logits.log_softmax(-1)
    chosen = tokens.unsqueeze(-1)
    cost = gaps.gather(-1, chosen).squeeze(-1) - (p * gaps).sum(-1)
    return cost.detach() * logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)


def exact_head_and_sampled_tail(logits, ref_logits, tokens):
    logp = logits.log_softmax(-1)
    gaps = (logp - ref_logits.log_softmax(-1)).detach()
    is_head = torch.zeros_like(logp).scatter(-1, logp.topk(3, -1).indices, 1.0)
    head = (is_head * logp.exp().detach() * gaps * logp).sum(-1)
    chosen = tokens.unsqueeze(-1)
    return head + ((1 - is_head) * gaps * logp).gather(-1, chosen).squeeze(-1)


def bucketed(logits, logits_ref, order, k):
    p, q = logits.log_softmax(-1), logits_ref.log_softmax(-1)
    top = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order.topk(k, -1).indices, True)
    low = torch.finfo(p.dtype).min
    rest_p = p.masked_fill(top, low).logsumexp(-1)
    rest_q = q.masked_fill(top, low).logsumexp(-1)
    return (p.exp() * (p - q) * top).sum(-1) + rest_p.exp() * (rest_p - rest_q)


def top_1_and_rest(logits, logits_ref):
    return bucketed(logits, logits_ref, logits, 1)


def top_100_and_rest(logits, logits_ref):
    return bucketed(logits, logits_ref, logits, 100)


def reference_top_20_and_rest(logits, logits_ref):
    return bucketed(logits, logits_ref, logits_ref, 20)


# --- methods and modules
class Trainer:
    def kl(self, logp, logp_ref):
        return (logp - logp_ref) ** 2 / 2

    @staticmethod
    def static_kl(logp, logp_ref):
        return (logp - logp_ref) ** 2 / 2


class Penalty(torch.nn.Module):
    def forward(self, logp, logp_ref):
        return (logp - logp_ref) ** 2 / 2


penalty = Penalty()

NAMES = [
    *("half_mse", "surrogate", "straight_through", "live_unit_ratio"),
    *("cast_and_back", "own_backward", "masked", "numeric_mask", "padding", "wide_huber"),
    *("to_go", "to_go_with_mask", "leave_one_out", "token_ratio", "token_ratio_capped"),
    *("per_decision", "prefix_ratio", "squared_total", "total_of_squares"),
    *("total_with_mask", "reinforce", "sequence_ratio", "sequence_ratio_capped", "full"),
    *("cross_entropy_minus_entropy", "from_probabilities", "tiny_floor", "full_in_float32"),
    *("full_per_completion", "full_that_takes_labels", "sampled_from_logits", "top_1_and_rest"),
    *("with_exact_baseline", "exact_head_and_sampled_tail"),
    *("top_100_and_rest", "reference_top_20_and_rest", "Trainer.kl", "Trainer.static_kl"),
    *("Penalty", "penalty", "penalty.forward"),
]
# right in sums over tokens; in a mean over each completion's own length they push its length
NAMES_IN_SUMS = ["with_a_constant_pull", "live_ratio"]
