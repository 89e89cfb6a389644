"""Names and meanings of facts, run keys, metrics and probes: all evidence besides record fields.

A writer may omit any of them and add others; `klinic.checks` lists the causes that need each.
"""

FACTS = {
    "kl_coef": "coefficient of the KL term in this step",
    "learning_rate": "of this update",
    "entropy_coef": "coefficient of an entropy bonus; 0 for none",
    "learner_version": "updates the learner had seen when the step began",
    "weights_published": "fingerprint of the weights that the learner handed out for this step",
    "weights_loaded": "fingerprint of the weights as the sampler reports them after loading",
    "reference_digest": "digest of the reference weights that scored this step",
    "reference_fingerprint": "fingerprint of the reference weights as they scored this step",
    "reference_step": "the step after which the reference last changed; 0 for never",
    "loss": "value of the whole loss",
    "loss_denominator": "what the summed loss was divided by",
    "micro_batch_size": "rows in a forward pass that carries the gradient",
    "scoring_batch_size": "rows in a forward pass that made `logp_old`",
    "num_micro_batches": "backward passes before the update",
    "num_empty_micro_batches": "those without a single trained token",
    "grad_norm": "of the whole gradient, before clipping",
    "grad_norm_kl": "of the KL term alone, coefficient included",
    "update_norm": "norm of the change of the weights",
    "unchanged_share": "share of the trained weights that the update left bit for bit the same",
    "loss_mask_from": '"emitted_by" where a writer gave no `loss_mask` and it was derived',
}

RUN_KEYS = {
    "schema": "1",
    "klinic": "version that wrote the run",
    "created": "when, in UTC, ISO 8601",
    "seed": "of every random stream",
    "threads": "of the learner's CPU kernels",
    "versions": "Python and libraries, by name",
    "sampling": "`temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, `max_new_tokens`, "
    "as the sampler really used them, after every default",
    "logprob_mode": '"processed": of the distribution that was really sampled from; "raw": of the '
    "bare logits",
    "eos_ids": "every token id that ends a completion",
    "declared_eos_ids": "those that the model's tokenizer and generation config name as ends",
    "pad_id": "the id used for padding, or null",
    "vocabulary_size": "ids the tokenizer can make",
    "policy": "`name`, `digest` of the weights at the start, `num_parameters`, `num_trainable`, "
    "`dtype`, `dropout` (the largest probability found), `num_experts` (0 for none), "
    "`untrained` (true where the recipe starts from random weights on purpose)",
    "reference": "`kind` (copy, adapter_off, adapter_frozen or none), `source`, `digest`, `wanted` "
    "(start: the policy as it starts; path: a model that the recipe names), `sync_every` (steps "
    "from reset to reset, or null), `ema` (share that stays in a step, or null)",
    "sampler": "`kind`, `dtype`, `max_version_lag`, `shares_weights` (true where it draws from the "
    "learner's own tensors)",
    "shards": "processes that share the learner's weights",
    "estimator": "name of the KL estimator, or null",
    "loss": "name of the policy loss, its clip range and its aggregation",
    "advantage": "name of the advantage",
    "group_size": "completions a prompt",
    "logp_old": '"scored", or "shared with logp" where one forward serves both',
}

METRICS = {
    "reward": "mean of all completions of the step, weighted sum of the functions",
    "kl": "k3 of policy against reference at `logp_old`, nats per token",
    "entropy": "mean over the trained tokens",
    "grad_norm": "before clipping",
    "clip_ratio": "share of the trained tokens whose ratio is clipped",
    "completions/parse_rate": "share of the completions in which the task finds an answer",
    "eval/accuracy": "on held-out prompts, by the task's own measure",
    "reward_scale": "what the policy term of the step was multiplied by, where that warms up",
    "discarded": "updates that were not made because loss or gradient was not a number",
}

PROBES = {
    "rescore": "the batch scored twice by the same weights: largest difference",
    "rescore_alone": "each row scored alone and unpadded, against `logp_old`",
    "rescore_float32": "the batch scored in float32, against `logp_old`",
    "adapters_off": "log-probs of the policy with its adapter off, against those of the reference",
    "kl_gradient": "the gradient with the KL term less that without, against the gradient that the "
    "estimator's name promises, computed apart",
    "micro_batches": "the gradient of the same rows in micro-batches of half the size: cosine and "
    "ratio of norms",
    "sampler_sync": "after the sampler took over weights, the mean distance of its log-probs from "
    "the policy's, in nats, for tokens drawn behind a long prompt that is asked every time "
    "(`repeated`), behind a new one (`fresh`), and for the latter from the policy at temperature 1 "
    "(`raw`) and without its adapter (`adapter_off`); `cached_tokens` of the first",
    "regrade": "rewards of the same completions in another order, and of the task's right answers",
}
