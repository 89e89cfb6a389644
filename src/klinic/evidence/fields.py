"""The names klinic knows outside a record's own fields, each with its meaning.

A writer may leave out any of them and add others; `causes.py` says what each is good for.
"""

FACTS = {
    "kl_coef": "coefficient of the KL term in this step",
    "learning_rate": "of this update",
    "entropy_coef": "coefficient of an entropy bonus; 0 for none",
    "learner_version": "updates the learner had seen when the step began",
    "weights_published": "fingerprint of the weights that the learner handed out for this step",
    "weights_loaded": "fingerprint of the weights as the sampler reports them after loading",
    "reference_digest": "digest of the reference weights that scored this step",
    "reference_step": "the step after which the reference last changed; 0 for never",
    "loss": "value of the whole loss",
    "loss_denominator": "what the summed loss was divided by",
    "micro_batch_size": "rows in a forward pass that carries the gradient",
    "scoring_batch_size": "rows in a forward pass that made `logp_old`",
    "num_micro_batches": "backward passes before the update",
    "num_empty_micro_batches": "those without a single trained token",
    "grad_norm": "of the whole gradient, before clipping",
    "grad_norm_kl": "of the KL term alone, coefficient included",
    "grad_cosine_kl": "cosine of the KL term's gradient with that of the exact KL",
    "update_norm": "norm of the change of the weights",
    "unchanged_share": "share of the trained weights that the update left bit for bit the same",
    "distance_from_start": "norm of the weights minus those at the start of the run",
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
    "pad_id": "the id used for padding, or null",
    "vocabulary_size": "ids the tokenizer can make",
    "policy": "`name`, `digest` of the weights at the start, `num_parameters`, `num_trainable`, "
    "`dtype`, `dropout` (the largest probability found)",
    "reference": "`kind` (copy, adapter_off, adapter_frozen or none), `source`, `digest`, "
    "`sync_every` (steps from reset to reset, or null), `ema` (share that stays in a step, or "
    "null)",
    "sampler": "`kind`, `dtype`, `max_version_lag`",
    "estimator": "name of the KL estimator, or null",
    "loss": "name of the policy loss, its clip range and its aggregation",
    "advantage": "name of the advantage",
    "group_size": "completions a prompt",
    "logp_old": '"scored", or "shared with logp" where one forward serves both',
}

METRICS = {
    "kl": "k3 of policy against reference at `logp_old`, nats per token",
    "entropy": "mean over the trained tokens",
    "grad_norm": "before clipping",
    "clip_ratio": "share of the trained tokens whose ratio is clipped",
    "eval/accuracy": "on held-out prompts, by the task's own measure",
}

PROBES = {
    "rescore": "the batch scored twice by the same weights: largest difference",
    "rescore_alone": "each row scored alone and unpadded, against `logp_old`",
    "rescore_float32": "the batch scored in float32, against `logp_old`",
    "rescore_temperature": "the temperature at which the learner comes nearest to `logp_sampler`, "
    "and to `logp_ref`",
    "rescore_versions": "the stored weight version that comes nearest to `logp_sampler`",
    "adapters_off": "log-probs with adapters off, and those of the start, against `logp_ref`",
    "kl_only_step": "the exact KL after a small step on the KL term alone",
    "kl_coef_difference": "the gradient at coefficient 0 and at the recipe's",
    "micro_batches": "gradient in one micro-batch and in several: cosine and ratio of norms",
    "warm_cache": "greedy tokens with a filled and with an emptied prefix cache",
    "regrade": "rewards graded again, and those of the reference answers",
    "weights_finite": "whether every weight of the learner and of the sampler is finite",
}
