"""Recommends an action for a user's function, with code that `klinic verify` calls correct."""

from klinic.verify.estimators import Verdict
from klinic.verify.function import FunctionMeasurement
from klinic.verify.toy_policies import COMPLETION_LENGTH

REVERSE_KL_GRADIENTS = {
    "reverse_token": "the gradient of KL(policy || reference), token by token",
    "reverse_sequence": "the whole gradient of KL(policy || reference) between completions",
    "bucket_token": "the gradient of a lower bound of KL(policy || reference)",
}

RATIO_CODE = "torch.exp(logp - logp_old).clamp(max=2)"
UNBIASED_CODE = "(ratio * (logp - logp_ref)).detach() * logp"
EXACT_CODE = "(p.exp() * (p - q)).sum(-1)"
USE_UNBIASED = (
    f"Use the estimator `unbiased`: `{UNBIASED_CODE}` with ratio = `{RATIO_CODE}`, logp_old being "
    "that of the sampler."
)
USE_EXACT = (
    f"Use the estimator `exact`: `{EXACT_CODE}` with p = `logits.log_softmax(-1)` and q = "
    "`logits_ref.log_softmax(-1)`."
)


def recommend_action(measured: FunctionMeasurement, verdict: Verdict) -> list[str]:
    """Return the recommended action, in one or two sentences."""
    if verdict == "correct":
        return [_recommend_keeping(measured)]
    if verdict == "conditional" and measured.gradient.target in REVERSE_KL_GRADIENTS:
        repair = _recommend_repair(measured)
        if repair:
            return repair
    sentences = []
    if measured.as_reward.target == "reverse_sequence" and measured.as_reward.scale > 0:
        sentences.append(
            "Detached and used as a cost in the reward it would be right, after the advantages are "
            "normalised (the estimator `k1_reward`)."
        )
    if (
        measured.value == "kl"
        and measured.value_scale > 0
        and not has_reverse_kl_gradient(measured)
    ):
        sentences.append("Use it as a metric, not as a loss.")
    takes_logits = "logits" in measured.roles.values()
    return [*sentences, USE_EXACT if takes_logits else USE_UNBIASED]


def has_reverse_kl_gradient(measured: FunctionMeasurement) -> bool:
    """Whether its gradient is, or nearly is, a multiple of one of KL(policy || reference)."""
    nearly = None if measured.nearly is None else measured.nearly.target
    return bool({measured.gradient.target, nearly} & set(REVERSE_KL_GRADIENTS))


def is_one(scale: float) -> bool:
    """Whether a multiple is 1 up to rounding: 1.001 is, 1.04 is a coefficient."""
    return abs(scale - 1) < 1e-3


def ratio_code(measured: FunctionMeasurement) -> str:
    """Return the factor that corrects the function for completions of an older policy.

    A pull that is made of one token needs the ratio of that token. One value per completion, or a
    pull that is made of several tokens, needs the ratio of the completion.
    """
    if measured.gradient.target == "reverse_token" and not measured.per_completion:
        return "torch.exp(logp - logp_old).detach()"
    log_ratio = "logp - logp_old"
    masks = [name for name, role in measured.roles.items() if role == "mask"]
    if masks:
        log_ratio = f"(logp - logp_old) * {masks[0]}"
    axis = "-1" if measured.per_completion else "-1, keepdim=True"
    return f"torch.exp(({log_ratio}).sum({axis})).detach()"


def _recommend_keeping(measured: FunctionMeasurement) -> str:
    if measured.off_policy is not None or measured.vocabulary is not None:
        return "Nothing needs to change."
    return (
        "Nothing needs to change while completions come from the policy itself; on those of an "
        f"older one, multiply it by the detached ratio `{ratio_code(measured)}`."
    )


def _recommend_repair(measured: FunctionMeasurement) -> list[str]:
    """Return the fix for a gradient that is right except for a factor or a missing ratio."""
    scale = measured.gradient.scale
    if measured.vocabulary is not None and measured.vocabulary.depends_on_size:
        return ["The factor changes with the size of the vocabulary: sum over it, not average."]
    if abs(scale * COMPLETION_LENGTH - 1) < 1e-3:
        return [
            "The factor is one over the number of tokens: it takes a mean over the completion, "
            "which no factor undoes when lengths differ. Return the KL of each token, or their sum."
        ]
    if abs(scale * measured.num_completions - 1) < 1e-3:
        return ["The factor is one over the batch: return the KL of each token, before any mean."]
    if not is_one(scale):
        return [f"Divide it by {scale:.6g}; otherwise the factor multiplies the KL coefficient."]
    if measured.off_policy is not None and measured.off_policy.form is None:
        return [
            "On completions of an older policy its gradient is not one that klinic knows, although "
            "it takes logp_old.",
            USE_UNBIASED,
        ]
    return []
