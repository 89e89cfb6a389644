"""Which fields tell which cause apart: the reason why each field is in schema 1.

A need is `place.name`: `record` (a field of StepRecord), `facts` (of a step), `run` (run.json),
`metrics` (metrics.jsonl) or `probes` (probes.jsonl, results of active checks).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseNeeds:
    """A cause of trouble and the places that tell it from others."""

    id: str
    name: str
    description: str
    needs: tuple[str, ...]
    left_out: str = ""
    """What would help and is not in schema 1, and why."""


def _cause(number: int, name: str, description: str, needs: str, left_out: str = "") -> CauseNeeds:
    return CauseNeeds(
        id=f"R{number}",
        name=name,
        description=description,
        needs=tuple(needs.split()),
        left_out=left_out,
    )


MASKED = "record.loss_mask record.row_offsets"
TWO_ENGINES = f"{MASKED} record.logp_sampler record.logp_old"
TO_REFERENCE = f"{MASKED} record.logp_old record.logp_ref"

CAUSES = (
    _cause(
        1,
        "stale-sampler",
        "the sampler keeps old weights",
        f"{TWO_ENGINES} record.logp_ref record.weight_version facts.weights_published "
        "facts.weights_loaded facts.learner_version run.sampler probes.sampler_sync",
    ),
    _cause(
        2,
        "temperature-on-one-side",
        "the temperature divides the logits of one side only",
        f"{TWO_ENGINES} record.logp_ref record.entropy run.sampling run.logprob_mode "
        "run.sampler probes.sampler_sync",
    ),
    _cause(
        3,
        "wrong-reference",
        "the reference is not the policy the run started from",
        f"{TO_REFERENCE} facts.learner_version facts.reference_digest run.policy run.reference "
        "probes.adapters_off",
    ),
    _cause(
        4,
        "misaligned-logp",
        "log-probs belong to other tokens than those they stand beside",
        f"{TWO_ENGINES} record.logp_ref record.token_ids",
        "the length of the logits before a gather: a shift or a fill shows in what was gathered",
    ),
    _cause(
        5,
        "retokenised",
        "tokens were decoded to text and encoded again",
        f"{TWO_ENGINES} record.token_ids record.emitted_by record.round_trip",
    ),
    _cause(
        6,
        "wrong-loss-mask",
        "tokens are trained on that the policy did not emit, or the reverse",
        f"{TWO_ENGINES} record.emitted_by record.logp_ref facts.loss_mask_from",
    ),
    _cause(
        7,
        "kl-gradient-wrong",
        "the KL estimator has another gradient than that of the KL",
        "facts.kl_coef run.estimator record.kl_exact probes.kl_gradient",
    ),
    _cause(
        8,
        "kl-not-applied",
        "the KL term does not reach the gradient, or reaches it twice",
        "facts.kl_coef facts.grad_norm_kl run.estimator probes.kl_gradient",
    ),
    _cause(
        9,
        "kl-sign-flipped",
        "the KL is maximised",
        "facts.kl_coef run.estimator probes.kl_gradient",
    ),
    _cause(
        10,
        "kl-tail-dominates",
        "a handful of tokens carry the KL, or its exponential overflows",
        f"{TO_REFERENCE} record.logp record.token_ids facts.loss facts.grad_norm run.estimator",
    ),
    _cause(
        11,
        "nan-outside-mask",
        "NaN leaks from masked or empty positions",
        f"{TO_REFERENCE} record.logp facts.loss facts.loss_denominator "
        "facts.num_empty_micro_batches",
        "padding: records are flat and have none; a NaN loss over finite tokens points there",
    ),
    _cause(
        12,
        "stale-prefix-cache",
        "the sampler's prefix cache outlives the weights that filled it",
        f"{TWO_ENGINES} record.cached_tokens facts.learner_version run.sampler probes.sampler_sync",
        "the age of cached blocks: engines do not report it",
    ),
    _cause(
        13,
        "hidden-sampling-transform",
        "the sampler truncates or penalises, and the learner does not",
        f"{TWO_ENGINES} record.rank record.entropy record.logp_ref record.token_ids "
        "record.prompt_ids run.sampling run.logprob_mode",
    ),
    _cause(
        14,
        "stop-token-fault",
        "the end of a completion is masked, missed or trained past",
        f"{MASKED} record.token_ids record.finish_reason run.eos_ids run.pad_id "
        "run.declared_eos_ids run.sampling",
    ),
    _cause(
        15,
        "advantage-explodes",
        "rewards are divided by a spread of almost nothing",
        "record.advantage record.reward record.group run.advantage run.group_size",
    ),
    _cause(
        16,
        "wrong-groups",
        "rewards are compared across prompts",
        "record.advantage record.reward record.group record.prompt_index record.prompt_ids "
        "record.prompt_offsets record.sample run.advantage run.group_size",
    ),
    _cause(
        17,
        "equal-rewards",
        "groups of equal rewards leave nothing to learn from",
        "record.reward record.advantage record.group facts.grad_norm",
    ),
    _cause(
        18,
        "loss-scaled-wrong",
        "the loss depends on how the step is cut into micro-batches or ranks",
        f"{MASKED} facts.loss_denominator facts.num_micro_batches facts.micro_batch_size "
        "facts.grad_norm run.loss probes.micro_batches",
    ),
    _cause(
        19,
        "imprecise-logp",
        "log-probs are rounded, or depend on the shape of the batch",
        f"{TWO_ENGINES} record.logp facts.micro_batch_size facts.scoring_batch_size run.policy "
        "run.sampler run.logp_old probes.rescore_float32",
    ),
    _cause(
        20,
        "routing-mismatch",
        "sampler and learner send tokens to different experts",
        f"{TWO_ENGINES} record.routing_mismatch run.policy",
        "the experts themselves: layers times tokens of them; the share that differs decides",
    ),
    _cause(
        21,
        "dropout-in-scoring",
        "the learner's forward is random",
        f"{MASKED} record.logp record.logp_old run.policy run.logp_old probes.rescore",
    ),
    _cause(
        22,
        "layout-changes-logp",
        "padding, packing or a fused kernel changes the log-probs",
        f"{TWO_ENGINES} record.logp record.prompt_offsets run.policy run.logp_old "
        "probes.rescore_alone",
    ),
    _cause(
        23,
        "prompt-mismatch",
        "the sampler saw another prompt than the learner scores",
        f"{TWO_ENGINES} record.prompt_ids record.prompt_offsets record.prompt_ids_match",
    ),
    _cause(
        24,
        "step-too-big",
        "every part is right and the policy moves too far in a step",
        f"{TO_REFERENCE} record.logp record.reward facts.learner_version facts.kl_coef "
        "facts.learning_rate facts.entropy_coef facts.grad_norm facts.grad_norm_kl "
        "facts.update_norm metrics.entropy metrics.clip_ratio run.policy",
    ),
    _cause(
        25,
        "policy-does-not-move",
        "the gradient is cut off, or the update is rounded away",
        "record.advantage facts.grad_norm facts.update_norm facts.unchanged_share "
        "facts.weights_published facts.learning_rate metrics.reward_scale metrics.discarded "
        "run.policy",
    ),
    _cause(
        26,
        "broken-reward",
        "rewards are missing, wrong, or in another order than the completions",
        "record.reward record.reward_parts record.group record.logp probes.regrade",
    ),
    _cause(
        27,
        "reward-hacking",
        "the reward rises and what it stands for does not",
        "record.reward record.reward_parts record.token_ids record.row_offsets "
        "metrics.reward metrics.eval/accuracy",
    ),
    _cause(
        28,
        "moved-reference",
        "the reference follows the policy, or is the policy",
        f"{TO_REFERENCE} facts.reference_digest facts.reference_fingerprint facts.reference_step "
        "facts.learner_version facts.weights_published run.reference",
    ),
    _cause(
        29,
        "samples-too-old",
        "the learner trains on samples of weights long past",
        f"{TWO_ENGINES} record.logp record.weight_version facts.learner_version run.sampler "
        "run.loss run.logp_old metrics.clip_ratio",
    ),
    _cause(
        30,
        "broken-sampler",
        "equal random streams, ids out of the vocabulary, or NaN in the engine",
        "record.token_ids record.row_offsets record.group record.entropy record.logp_old "
        "record.logp_sampler record.emitted_by "
        "run.vocabulary_size",
        "the engine's own random state: equal completions of high entropy show it",
    ),
    _cause(
        31,
        "wrong-metric",
        "the run is well and its curve is wrong",
        f"{TO_REFERENCE} record.entropy metrics.kl metrics.entropy metrics.grad_norm "
        "facts.grad_norm",
    ),
    _cause(
        32,
        "context-truncated",
        "completions are cut off before they can end",
        f"{MASKED} record.token_ids record.finish_reason run.eos_ids run.sampling",
    ),
    _cause(
        33,
        "random-weights",
        "the policy knows nothing, as if its weights had not been loaded",
        f"{MASKED} record.entropy facts.learner_version run.vocabulary_size",
    ),
    _cause(
        34,
        "malformed-output",
        "completions are not answers, so rewards have nothing to grade",
        "record.reward metrics.completions/parse_rate",
    ),
    _cause(
        35,
        "cliff-rewards",
        "almost everybody gets the lowest reward, and there is nothing in between",
        "record.reward record.group",
    ),
)
"""In the order of how often and how silently each ruins a run."""
