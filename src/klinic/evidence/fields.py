"""Names and meanings of facts, run keys, metrics and probes: all evidence besides record fields.

A writer may omit any of them and add others; `klinic.checks` lists the causes that need each.
"""

FACTS = {
    "kl_coef": "coefficient of the KL term in this step",
    "kl_logged": "the KL as the trainer logged it, by its own estimator",
    "learning_rate": "of this update",
    "entropy_coef": "coefficient of an entropy bonus; 0 for none",
    "learner_version": "number of updates before the step",
    "weights_published": "fingerprint of the weights that the learner published for this step",
    "weights_loaded": "fingerprint of the weights as the sampler reports them after loading",
    "reference_digest": "digest of the reference weights that scored this step",
    "reference_fingerprint": "fingerprint of the reference weights as they scored this step",
    "teacher_coef": "coefficient of the KL to the teacher in this step",
    "teacher_digest": "digest of the teacher as it was loaded",
    "teacher_fingerprint": "fingerprint of the teacher's weights as they scored this step",
    "reference_step": "the step after which the reference last changed; 0 for never",
    "loss": "value of the whole loss that is minimised, unrounded, KL and entropy terms included",
    "loss_denominator": "divisor of the summed loss of all rows",
    "num_rank_weights": "number of different weights among the processes, by their fingerprints",
    "num_split_groups": "groups of one prompt of the dataset whose members received different "
    "prompts, from the `reset` of an environment",
    "micro_batch_size": "rows in a forward pass that carries the gradient",
    "scoring_batch_size": "rows in a forward pass that computed `logp_old`",
    "num_micro_batches": "backward passes before the update",
    "num_empty_micro_batches": "those without a trained token",
    "grad_norm": "of the whole gradient, before clipping",
    "grad_norm_kl": "of the KL term alone, coefficient included",
    "grad_norm_teacher": "of the KL term to the teacher alone, coefficient included",
    "update_norm": "norm of the change of the weights",
    "unchanged_share": "fraction of the trained weights that the update left bitwise unchanged",
    "answer_prompts": "prompts of which some completions state the dataset's answer and others do "
    "not, in a batch that was graded for this step",
    "answer_paid_more": "those in which a reward function that reads the answer pays it more than "
    "the other completions, on average",
    "answer_paid_less": "those in which none pays it more, and one pays it less",
    "regraded_right": "completions whose marked final answer is the dataset's, a number, in a step "
    "with wrong ones too; a dump of texts",
    "regraded_wrong": "completions with another number than the dataset's",
    "regraded_right_paid": "right ones that some reward function pays more than the least paid "
    "wrong one",
    "regraded_prompts": "prompts with two right completions or more",
    "regraded_prompts_paid": "those of them whose right completions are all paid",
    "regraded_prompts_unpaid": "those of which none is paid",
    "regraded_told_apart": "prompts whose right completions alone get the highest reward, of the "
    "function with the most of them",
    "regraded_all_paid": "prompts whose wrong answers, different from one another, all get it",
    "num_moved_rows": "rows at another place of the batch than their sample; the advantage of "
    "a place must move with its row",
    "generation_rows": "samples of the generation that the rows of the step belong to",
    "step_rows": "rows of the step, if the record is a sample of them: the live doctor's, with "
    "several processes",
    "updates_on_generation": "earlier steps on the generation of this one, while it was the newest",
    "num_changed_rows": "rows with other token ids than were sampled",
    "num_reencoded_rows": "rows whose ids differ from the sampled ones in the middle, as after "
    "decoding and encoding",
    "loss_mask_from": '"emitted_by" if a writer passed no `loss_mask` and it was derived',
}

RUN_KEYS = {
    "schema": "2; 1 is read as well",
    "klinic": "version that wrote the run",
    "trainer": '"klinic", "trl", "verl" or another: fixes name the settings of this trainer',
    "created": "time of creation in UTC, ISO 8601",
    "seed": "of all random streams",
    "threads": "of the learner's CPU kernels",
    "versions": "Python and libraries, by name",
    "sampling": "`temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, "
    "`max_new_tokens`, as the sampler used them, defaults included",
    "logprob_mode": '"processed": of the distribution that was sampled from; "raw": of the '
    "unprocessed logits",
    "eos_ids": "every token id that ends a completion",
    "declared_eos_ids": "those that the model's tokenizer and generation config declare",
    "end_like_ids": "those whose text is that of an end token, such as `<|im_end|>`",
    "pad_id": "the id used for padding, or null",
    "token_ids": '"characters" if the source has texts only: each character stands for a token, '
    "which shows equal completions and no more",
    "vocabulary_size": "number of ids that the tokenizer can produce",
    "policy": "`name`, `digest` of the weights at the start, `num_parameters`, `num_trainable`, "
    "`dtype`, `dropout` (the largest probability), `num_experts` (0 for none), `untrained` (true "
    "if the recipe starts from random weights on purpose)",
    "reference": "`kind` (copy, adapter_off, adapter_frozen or none), `source`, `digest`, "
    "`wanted` (start: the policy at the start; path: a model that the recipe names), `sync_every` "
    "(updates between resets, or null), `ema` (fraction retained per step, or null)",
    "teacher": "`kind`, `source` and `digest` of the model that the policy is distilled from, "
    "`estimator`, `coef`, `alone` (true if it replaces the rewards in the loss); null without one",
    "sampler": "`kind`, `dtype`, `max_version_lag` (largest number of updates between the weights "
    "that sampled a generation and the learner's at its first update on it), `shares_weights` "
    "(true if it samples from the learner's own tensors)",
    "shards": "number of processes that share the learner's weights",
    "processes": "number of training processes; each has rows of its own",
    "estimator": "name of the KL estimator, or null",
    "kl_target": "KL that a controller of the coefficient holds, in nats per token",
    "loss": "`name` of the policy loss, `clip_low`, `clip_high`, `aggregation`, `overridden` (true "
    "if the user's code replaces the trainer's loss), `importance_cap` (largest weight of a token "
    "against the sampler, which multiplies the policy term)",
    "advantage": "name of the advantage estimator",
    "group_size": "completions per prompt",
    "updates_per_generation": "steps that train on one generation of samples, such as mini-batches "
    "and epochs",
    "max_steps": "number of steps that the run is planned for",
    "warmup_steps": "steps of the warm-up of the learning rate; 0 for none",
    "logp_old": '"scored", or "shared with logp" if one forward pass computes both',
}

METRICS = {
    "reward": "mean over all completions of the step of the weighted sum of the reward functions",
    "kl": "k3 of policy against reference at `logp_old`, nats per token",
    "teacher/kl": "k3 of policy against teacher at `logp_old`, nats per token",
    "entropy": "mean over the trained tokens",
    "grad_norm": "before clipping",
    "clip_ratio": "fraction of the trained tokens whose ratio is clipped",
    "completions/parse_rate": "fraction of the completions from which the task parses an answer",
    "eval/accuracy": "on held-out prompts, by the task's own measure",
    "reward_scale": "factor of the policy term of the step, during its warm-up",
    "discarded": "updates that were not made: loss or gradient was not finite, or no term was left",
}

NOTHING_ARRIVED = "none of the tensors arrived"
"""The value of `damage` in the probe `sampler_sync` after a weight sync without weights."""

PROBES = {
    "rescore": "the batch scored twice by the same weights: largest difference",
    "rescore_alone": "each row scored alone and unpadded, against `logp_old`",
    "rescore_float32": "the batch scored in float32, against `logp_old`",
    "adapters_off": "log-probs of the policy with its adapter off, against those of the reference",
    "kl_gradient": "the gradient with the KL term minus that without it, against the gradient "
    "that the estimator's name promises, computed independently",
    "teacher_gradient": "the gradient of the KL to the teacher, against that of its estimator with "
    "a constant teacher, computed independently",
    "teacher_rescore": "the teacher's log-probs of the step, against those that the teacher gives "
    "for the same prompts and completions",
    "policy_gradient": "the gradient with the advantages minus that with advantages of 0, against "
    "that of -advantage times logp, if the ratio is 1",
    "micro_batches": "the gradient of the same rows in micro-batches of half the size: cosine and "
    "ratio of norms",
    "sampler_sync": "after a weight sync, the mean distance of the sampler's log-probs from the "
    "policy's, in nats, for tokens sampled after a long prompt that is the same every time "
    "(`repeated`) and after a new one (`fresh`); for the new one also from the policy at "
    "temperature 1 (`raw`) and without its adapter (`adapter_off`); `cached_tokens` of the "
    "repeated prompt; the tensors that arrived otherwise than they were sent (`damage`)",
    "regrade": "rewards of the same completions in another order, and of the task's correct "
    "answers",
}
