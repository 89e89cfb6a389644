"""What every metric of a run means; `klinic explain` and docs/reference/metrics.md print it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricMeaning:
    """Metrics that belong together, with their unit and their meaning as Markdown."""

    names: tuple[str, ...]
    """A part in capitals stands for any name, and an ellipsis for the statistics listed."""
    unit: str
    meaning: str

    def has_metric(self, metric: str) -> bool:
        """Whether this describes a metric, such as `rewards/NAME/mean` for `rewards/f1/mean`."""
        return any(_matches(name.split("/"), metric.split("/")) for name in self.names)


def _matches(pattern: list[str], metric: list[str]) -> bool:
    if pattern[-1] == "…" and len(metric) == len(pattern):
        pattern, metric = pattern[:-1], metric[:-1]
    return len(pattern) == len(metric) and all(
        part.isupper() or part == own for part, own in zip(pattern, metric, strict=True)
    )


METRIC_MEANINGS = (
    MetricMeaning(
        names=("loss",),
        unit="reward",
        meaning=(
            "the loss that is minimised: `policy_loss` plus `kl_penalty` plus `teacher_penalty`"
        ),
    ),
    MetricMeaning(
        names=("policy_loss",),
        unit="reward",
        meaning=(
            "the clipped policy term; on policy 0 with `grpo` and `gspo` and a centred advantage,"
            " else minus the covariance of advantage and length, in units of the loss's "
            "denominator (0.41 and 1.35 seen with `dr_grpo`). No measure of progress"
        ),
    ),
    MetricMeaning(
        names=("kl_loss",),
        unit="nats",
        meaning=(
            "the KL term of the loss as it is minimised, without its coefficient: the value of "
            "`kl.estimator`, aggregated over tokens as `learner.loss` does"
        ),
    ),
    MetricMeaning(
        names=("kl_penalty",),
        unit="reward",
        meaning="`kl_coef` times `kl_loss`",
    ),
    MetricMeaning(
        names=("kl_coef",),
        unit="reward per nat",
        meaning="the coefficient of this step, warm-up included",
    ),
    MetricMeaning(
        names=(
            "kl_target",
            "kl_coef/saturated",
        ),
        unit="nats per token; -1, 0 or 1",
        meaning=(
            "with a controller: its target KL (the mean of `kl_k1`, nats per token), and -1 or 1 "
            "if the coefficient is held at its lower or upper bound, else 0"
        ),
    ),
    MetricMeaning(
        names=("kl",),
        unit="nats per token",
        meaning=(
            "k3 of policy against reference at `logp_old`: KL(policy || reference) per token, "
            "never multiplied, never clamped"
        ),
    ),
    MetricMeaning(
        names=(
            "kl_k3/…",
            "kl_k1/…",
            "kl_exact/…",
        ),
        unit="nats; `top_share` and `share_above` fractions",
        meaning=(
            "three measures of the same KL: `mean`, `min`, `max`, `p99` over tokens, `top_share` "
            "(fraction carried by the largest 0.1% of tokens), `share_above` (fraction of tokens "
            "beyond 1 nat), `per_sequence` and `per_sequence_max` (summed over a completion). "
            "Exact is over the whole vocabulary (under truncated sampling, the kept tokens), on "
            "the first completion of each prompt, and on all of them with `kl.estimator` `exact`,"
            " `topk` or `sequence`"
        ),
    ),
    MetricMeaning(
        names=("kl/num_saturated",),
        unit="tokens",
        meaning="trained tokens whose importance weight is above `learner.importance_sampling_cap`",
    ),
    MetricMeaning(
        names=(
            "kl/grad_norm_kl",
            "kl/grad_share",
            "kl/grad_cosine_policy",
        ),
        unit="norm; fraction; cosine",
        meaning=(
            "the KL term's contribution to the gradient: its norm, its fraction of the norms of "
            "all terms, the cosine to the policy term. Every 10 steps of the first 100, then "
            "every 50, since it costs a second pass"
        ),
    ),
    MetricMeaning(
        names=("kl_to_start",),
        unit="nats per token",
        meaning=(
            "k3 of policy against the policy at the start of the run; only with a [moving "
            "reference](../how-to/moving-reference.md), in the step after a reset and every 10 "
            "steps of the first 100, then every 50"
        ),
    ),
    MetricMeaning(
        names=("teacher/kl",),
        unit="nats per token",
        meaning="with a [teacher](../how-to/distil.md): k3 of policy against teacher at `logp_old`",
    ),
    MetricMeaning(
        names=("teacher/kl_k1/…",),
        unit="nats; fractions",
        meaning="k1 of the same, distributed as `kl_k1/…`",
    ),
    MetricMeaning(
        names=("teacher/kl_exact",),
        unit="nats per token",
        meaning=(
            "the same over the whole vocabulary, on the first completion of each prompt, and on "
            "all of them with `teacher.estimator` `exact`, `topk` or `sequence`"
        ),
    ),
    MetricMeaning(
        names=(
            "teacher_loss",
            "teacher_coef",
            "teacher_penalty",
        ),
        unit="nats; reward per nat; reward",
        meaning=(
            "the teacher's term of the loss without its coefficient, the coefficient, and their "
            "product"
        ),
    ),
    MetricMeaning(
        names=(
            "teacher/grad_norm_teacher",
            "teacher/grad_share",
            "teacher/grad_cosine_policy",
        ),
        unit="norm; fraction; cosine",
        meaning="the teacher term's contribution to the gradient, as for the KL term",
    ),
    MetricMeaning(
        names=("kl_update",),
        unit="nats per token",
        meaning=(
            "k1 of the old policy against the current one within the step; 0 with one update per "
            "batch"
        ),
    ),
    MetricMeaning(
        names=(
            "logp",
            "logp_ref",
            "logp_teacher",
        ),
        unit="nats per token",
        meaning="mean log-prob under policy, reference and teacher",
    ),
    MetricMeaning(
        names=("entropy",),
        unit="nats per token",
        meaning=(
            "of the policy's whole distribution; under top-p, top-k or min-p, of the kept tokens"
        ),
    ),
    MetricMeaning(
        names=(
            "grad_norm",
            "grad_norm_clipped",
        ),
        unit="norm",
        meaning="before and after clipping",
    ),
    MetricMeaning(
        names=("learning_rate",),
        unit="",
        meaning="of this update",
    ),
    MetricMeaning(
        names=(
            "update_norm",
            "unchanged_share",
        ),
        unit="norm; fraction",
        meaning=(
            "norm of the change of the weights, and the fraction of weights that did not change; "
            "every 10 steps of the first 100, then every 50"
        ),
    ),
    MetricMeaning(
        names=(
            "clip_ratio/low_mean",
            "clip_ratio/high_mean",
            "clip_ratio/region_mean",
        ),
        unit="fraction of tokens",
        meaning=(
            "tokens below the range with a negative advantage, above it with a positive one, and "
            "either; 0 with one update per batch. `cispo` clips above only, whatever the "
            "advantage; tokens that `mask_truncated` drops count too"
        ),
    ),
    MetricMeaning(
        names=(
            "reward",
            "reward_std",
        ),
        unit="reward",
        meaning="over the completions that have one",
    ),
    MetricMeaning(
        names=(
            "rewards/NAME/mean",
            "rewards/NAME/std",
        ),
        unit="that function's",
        meaning="by reward function, before weights",
    ),
    MetricMeaning(
        names=("reward_scale",),
        unit="factor",
        meaning="with `learner.reward_warmup_steps`: factor of the policy term of this step",
    ),
    MetricMeaning(
        names=("reward/penalized",),
        unit="reward",
        meaning="reward minus `kl_coef` times the completion's summed k1",
    ),
    MetricMeaning(
        names=(
            "reward/missing",
            "reward/nonfinite",
        ),
        unit="completions",
        meaning=(
            "completions without a reward; returned values that are NaN, infinite or beyond 1e12 "
            "in size, which count as none"
        ),
    ),
    MetricMeaning(
        names=(
            "reward/timeouts",
            "reward/crashed",
            "reward/failed",
        ),
        unit="completions",
        meaning=(
            "completions without a value of a reward function: it took too long, its process "
            "died, or every try failed"
        ),
    ),
    MetricMeaning(
        names=("frac_reward_zero_std",),
        unit="fraction of prompts",
        meaning="prompts whose completions all got the same reward",
    ),
    MetricMeaning(
        names=("advantage/max",),
        unit="reward",
        meaning="largest absolute advantage",
    ),
    MetricMeaning(
        names=(
            "completions/mean_length",
            "completions/min_length",
            "completions/max_length",
            "completions/mean_terminated_length",
        ),
        unit="tokens",
        meaning="tokens",
    ),
    MetricMeaning(
        names=("completions/clipped_ratio",),
        unit="fraction of completions",
        meaning="completions that reached the length limit",
    ),
    MetricMeaning(
        names=("completions/parse_rate",),
        unit="fraction of completions",
        meaning="completions from which the task can parse an answer",
    ),
    MetricMeaning(
        names=("num_tokens",),
        unit="tokens",
        meaning="trained tokens of the step",
    ),
    MetricMeaning(
        names=(
            "sampling/sampling_logp_difference/mean",
            "sampling/sampling_logp_difference/max",
        ),
        unit="nats",
        meaning="learner against sampler, absolute: rounding only, on one machine",
    ),
    MetricMeaning(
        names=("sampling/staleness",),
        unit="updates",
        meaning="with asynchronous sampling: updates since the weights that sampled the batch",
    ),
    MetricMeaning(
        names=(
            "sampling/sync_gap_repeated",
            "sampling/sync_gap_fresh",
        ),
        unit="nats",
        meaning=(
            "with an engine: distance of its log-probs from the policy's right after a sync, for "
            "a repeated prompt and for a new one; mean over the most likely outcomes"
        ),
    ),
    MetricMeaning(
        names=("sampling/effective_sample_size",),
        unit="fraction of tokens",
        meaning=(
            "effective sample size under the uncapped token ratios to the sampler, whatever "
            "`learner.importance_sampling` is; 1 for all"
        ),
    ),
    MetricMeaning(
        names=("completions/kl_dropped",),
        unit="completions",
        meaning=(
            "with `kl.rollout_limit`: completions that only the KL term trains on, since their "
            "summed KL to the reference is above it; always 0 without the sampler's log-probs"
        ),
    ),
    MetricMeaning(
        names=(
            "sampling/rounds",
            "sampling/groups_dropped",
        ),
        unit="batches; groups",
        meaning="with `loop.extra_rounds`: batches sampled in the step, and groups left out of it",
    ),
    MetricMeaning(
        names=("discarded",),
        unit="updates",
        meaning=(
            "without recovery: updates that were not made because the loss or gradient was "
            "non-finite, or because every completion is above `kl.rollout_limit` at a coefficient"
            " of 0"
        ),
    ),
    MetricMeaning(
        names=(
            "kl_new_old",
            "updates_left",
        ),
        unit="nats per token; updates",
        meaning=(
            "with `recovery.update_kl_limit`: KL(new || old) per token after the updates of the "
            "batch, and the number of updates omitted because of it"
        ),
    ),
    MetricMeaning(
        names=(
            "time/sample",
            "time/reward",
            "time/learn",
        ),
        unit="seconds",
        meaning="sampling, rewards, everything of the learner",
    ),
    MetricMeaning(
        names=("time/ahead",),
        unit="seconds",
        meaning=(
            "with asynchronous sampling: seconds that the batch took, in parallel with the "
            "learner; `time/sample` is then the time spent waiting for it"
        ),
    ),
    MetricMeaning(
        names=(
            "eval/accuracy",
            "eval/accuracy/SKILL",
        ),
        unit="fraction of rows",
        meaning="greedy accuracy on held-out rows: of the trained skill, and of each",
    ),
    MetricMeaning(
        names=("eval/retention",),
        unit="fraction of the start",
        meaning=(
            "accuracy on the skills that are not trained, or reward on the `retention` rows, "
            "relative to the start"
        ),
    ),
    MetricMeaning(
        names=("eval/rewards/NAME",),
        unit="that function's",
        meaning="mean over the same rows of a task's other measures, such as `legal` of chess",
    ),
    MetricMeaning(
        names=("eval/reward",),
        unit="reward",
        meaning=(
            "mean reward of greedy completions of the `eval` rows, or of the held-out rows of a "
            "task"
        ),
    ),
    MetricMeaning(
        names=("eval/retention_reward",),
        unit="reward",
        meaning="mean reward of greedy completions of the `retention` rows",
    ),
)
