"""Maps the metric names of each trainer to those of klinic:

loss                       value of the whole loss
grad_norm                  before clipping
learning_rate
reward, reward_std         of the completions of a step; reward/min, reward/max
frac_reward_zero_std       fraction of the groups whose rewards are all equal
advantage/min, /max        as the loss used it
kl                         of policy against reference, by an estimator that is never negative
kl_k1/mean                 the same as a mean of log-ratios, which may be negative
loss/kl                    the KL term of the loss, coefficient included
entropy                    nats per token
frac_mixed                 fraction of the groups whose rewards differ
completions/clipped_ratio  fraction of the completions cut off at the length limit
completions/equal_ratio    fraction of the completions that repeat another of their group
sampler/gap                mean of |log-prob of the sampler - that of the learner|, nats
sampler/kl                 mean of half its square, or k3 of it
sampler/prob_gap           mean of |probability of the sampler - that of the learner|
sampler/mult_prob_error    mean of exp(|log-prob of the sampler - that of the learner|), 1 at best
staleness/max              largest number of updates since a sample of the step was generated

`source` of a trainer is where its names were read: version or commit, then file:line.
"""

from klinic.evidence.readers.trainer import Trainer

WRITE = "Write them from your trainer: docs/how-to/write-evidence.md, 30 lines."
SLIME_DUMP = (
    "Start with `--dump-details DIR`, then `klinic convert DIR runs/mine` where torch is installed."
)

AS_TRL = {
    **{
        name: name
        for name in (
            *("loss", "grad_norm", "learning_rate", "kl", "entropy", "completions/clipped_ratio"),
            *("reward", "reward_std", "frac_reward_zero_std"),
        )
    },
    "sampling/sampling_logp_difference/mean": "sampler/gap",
}
"""Metric names that klinic and TRL share."""
CONVERTED = (
    *("sampler/gap", "sampler/kl", "sampler/prob_gap", "sampler/mult_prob_error", "frac_mixed"),
    *("reward/min", "reward/max", "completions/equal_ratio", "loss/kl", "staleness/max"),
)
"""Names that only a run of another trainer has after `klinic convert`."""

KLINIC = Trainer(
    name="klinic",
    has_k3=True,
    names={**AS_TRL, "kl_k1/mean": "kl_k1/mean", **{name: name for name in CONVERTED}},
    marks=("policy_loss", "kl_penalty", "kl_coef", "advantage/max", "time/learn", "update_norm"),
    klinic_records="Train with output.records_every: 1.",
)
TRL = Trainer(
    name="TRL",
    source="TRL 1.16.0: trl/trainer/grpo_trainer.py:2828, 2868, 3268, 3270",
    has_k3=True,
    names={**AS_TRL, "klinic/kl_k1/mean": "kl_k1/mean"},
    marks=("completions/mean_length", "num_tokens", "epoch", "clip_ratio/region_mean"),
    drops_nan=True,
    klinic_records="Two lines record them: `import klinic` and `klinic.attach(trainer, "
    '"runs/mine")` before `trainer.train()`.',
    why_none={"kl": "at beta 0 TRL has no reference and logs none"},
)
VERL = Trainer(
    name="verl",
    source="verl 0.9.1: verl/trainer/ppo/metric_utils.py:556-592, ppo/core_algos.py:1372, "
    "ppo/ray_trainer.py:115, ppo/rollout_corr_helper.py:966, utils/debug/metrics.py:78",
    names={
        "actor/pg_loss": "loss",
        "actor/grad_norm": "grad_norm",
        "actor/lr": "learning_rate",
        "critic/score/mean": "reward",
        "critic/score/min": "reward/min",
        "critic/score/max": "reward/max",
        "critic/advantages/min": "advantage/min",
        "critic/advantages/max": "advantage/max",
        "actor/kl_loss": "kl",
        "kl_loss": "kl",
        "actor/reward_kl_penalty": "kl_k1/mean",
        "critic/kl": "kl_k1/mean",
        "actor/entropy": "entropy",
        "actor/entropy_loss": "entropy",
        "response_length/clip_ratio": "completions/clipped_ratio",
        "training/rollout_probs_diff_mean": "sampler/prob_gap",
        "rollout_corr/k3_kl": "sampler/kl",
    },
    marks=("actor/pg_clipfrac", "actor/ppo_kl", "response_length/mean", "training/global_step"),
    klinic_records=WRITE,
)
OPENRLHF = Trainer(
    name="OpenRLHF",
    source="OpenRLHF 0.11.0: openrlhf/trainer/ray/ppo_actor.py:314-376, "
    "trainer/ppo_utils/experience_maker.py:194-311",
    names={
        "policy_loss": "loss",
        "actor_grad_norm": "grad_norm",
        "actor_lr": "learning_rate",
        "reward": "reward",
        "kl": "kl_k1/mean",
        "entropy_loss": "entropy",
        "truncated": "completions/clipped_ratio",
        "vllm_kl": "sampler/kl",
        "group_reward_std": "reward_std",
    },
    marks=("ppo_clip_ratio", "ppo_kl", "response_length", "total_length", "return"),
    klinic_records=WRITE,
)
PRIME_RL = Trainer(
    name="prime-rl",
    source="prime-rl 559b44772: src/prime_rl/trainer/rl/train.py:624-675, "
    "orchestrator/orchestrator.py:697-702, orchestrator/metrics.py:324-347",
    names={
        "loss/mean": "loss",
        "optim/grad_norm": "grad_norm",
        "optim/lr": "learning_rate",
        "reward/mean": "reward",
        "reward/all/mean": "reward",
        "entropy/all/mean": "entropy",
        "mismatch_kl/all/mean": "sampler/kl",
        "is_truncated/mean": "completions/clipped_ratio",
        "is_truncated/all/mean": "completions/clipped_ratio",
        "agg/all/agent/reward/mean": "reward",
        "agg/all/agent/is_truncated/mean": "completions/clipped_ratio",
    },
    marks=("kl_ent_ratio/mean", "seq_len/all/mean", "time/step"),
    drops_nan=True,
    klinic_records="Set `trainer.enable_token_export = true` and give the folder that has "
    "`token_exports`.",
)
TINKER = Trainer(
    name="tinker",
    source="tinker-cookbook of August 2026",
    names={
        "optim/lr": "learning_rate",
        "optim/entropy": "entropy",
        "optim/kl_sample_train_v2": "sampler/kl",
        "env/all/reward/total": "reward",
        "reward/total": "reward",
        "env/all/by_group/frac_mixed": "frac_mixed",
        "kl_policy_base": "kl_k1/mean",
    },
    marks=("progress/batch", "progress/done_frac", "optim/kl_sample_train_v1", "time/total"),
    klinic_records=WRITE,
)
NEMO_RL = Trainer(
    name="NeMo-RL",
    source="NeMo-RL 7ea279abf: nemo_rl/algorithms/grpo.py:2441-2451, 3433-3497, "
    "experience/rollouts.py:1070",
    names={
        "loss": "loss",
        "grad_norm": "grad_norm",
        "lr": "learning_rate",
        "reward": "reward",
        "advantages/min": "advantage/min",
        "advantages/max": "advantage/max",
        "kl_penalty": "kl",  # without the coefficient, despite its name
        "approx_entropy": "entropy",
        "truncation_rate": "completions/clipped_ratio",
        "gen_kl_error": "sampler/kl",
        "token_mult_prob_error": "sampler/mult_prob_error",
    },
    marks=(
        *("policy_kl_error", "js_divergence_error", "sampling_importance_ratio", "probs_ratio"),
        *("probs_ratio_clamped", "mean_prompt_length", "total_num_tokens", "advantages/mean"),
        *(
            "global_valid_toks",
            "global_valid_seqs",
            "num_valid_samples",
            "natural_termination_rate",
        ),
        *("baseline_reward/pct_0", "baseline_reward/pct_1", "baseline_reward/pct_mixed"),
    ),
    klinic_records="NeMo-RL writes them by default: give the folder of its logs, which has "
    "`train_data_step1.jsonl` and so on",
    why_none={"kl": "with reference_policy_kl_penalty 0 NeMo-RL logs kl_penalty as 0"},
    zero_is_none=("kl",),
)
SLIME = Trainer(
    name="slime",
    source="slime 624b824a8: slime/backends/megatron_utils/loss.py:1143, model.py:886-897, "
    "observability/rollout_metrics.py:54, observability/train_metric_utils.py:134",
    names={
        "loss": "loss",
        "grad_norm": "grad_norm",
        "lr-pg_0": "learning_rate",
        "rollout/raw_reward": "reward",
        "kl_loss": "kl_k1/mean",  # by default; --kl-loss-type may change it
        "entropy_loss": "entropy",
        "rollout/truncated_ratio": "completions/clipped_ratio",
        "train_rollout_logprob_abs_diff": "sampler/gap",
    },
    marks=(
        *("pg_loss", "pg_clipfrac", "ppo_kl", "global_batch_size", "ois", "rollout/rewards"),
        *("rollout/log_probs", "rollout/ref_log_probs", "rollout/rollout_log_probs"),
        *("rollout/advantages", "rollout/repetition_frac", "rollout/response_len/mean"),
        "perf/rollout_time",
    ),
    klinic_records=SLIME_DUMP,
    why_none={"kl": "without --use-kl-loss slime logs none"},
)
SKYRL = Trainer(
    name="SkyRL",
    source="SkyRL a9564572e: skyrl/train/trainer.py:1112, 1403, 1458, "
    "backends/skyrl_train/workers/worker.py:1114-1124, workers/worker_utils.py:25",
    names={
        "policy/final_loss": "loss",
        "policy/grad_norm": "grad_norm",
        "policy/policy_lr": "learning_rate",
        "reward/avg_raw_reward": "reward",
        "policy/policy_kl": "kl",
        "loss/avg_kl": "kl",
        "policy/policy_entropy": "entropy",
        "policy/rollout_train_logprobs_abs_diff_mean": "sampler/gap",
        "policy/minibatch_rollout_logprobs_abs_diff_mean": "sampler/gap",
    },
    marks=(
        *("policy/policy_loss", "loss/avg_final_rewards", "loss/avg_raw_advantages"),
        *("trainer/global_step", "trainer/epoch", "generate/avg_num_tokens"),
    ),
    klinic_records=WRITE,
    why_none={"kl": "without use_kl_loss and use_kl_in_reward SkyRL logs none"},
)
OPEN_INSTRUCT = Trainer(
    name="open-instruct",
    source="open-instruct e6c3044aa: open_instruct/grpo_utils.py:365, 675-729, "
    "data_loader.py:1547-1568, grpo_fast.py:584, 754",
    names={
        "loss/total_avg": "loss",
        "optim/grad_norm": "grad_norm",
        "lr": "learning_rate",
        "scores": "reward",
        "val/advantages_min": "advantage/min",
        "val/advantages_max": "advantage/max",
        "objective/kl2_avg": "kl",  # numbered from 0: this is k3
        "objective/kl0_avg": "kl_k1/mean",
        "loss/kl_avg": "loss/kl",
        "policy/entropy_avg": "entropy",
        "debug/vllm_vs_local_logprob_diff_mean": "sampler/gap",
    },
    marks=(
        *("objective/kl1_avg", "objective/kl3_avg", "loss/policy_avg", "policy/clipfrac_avg"),
        *("val/ratio", "val/stop_rate", "episode", "training_step", "epoch", "time/total"),
        "debug/vllm_local_reverse_kl",
    ),
    klinic_records="Set `--save_traces true` and give `--rollouts_save_path`",
    why_none={"kl": "without a reference open-instruct logs objective/kl2_avg as 0"},
    zero_is_none=("kl", "kl_k1/mean", "loss/kl"),
)
MILES = Trainer(
    name="miles",
    source="miles 31f1ca961: miles/backends/training_utils/loss_hub/losses.py:362-377, "
    "training_utils/log_utils.py:525, ray/rollout/metrics.py:105",
    names={**SLIME.names, "train_rollout_kl": "sampler/kl"},
    marks=SLIME.marks,
    fork_of="slime",
    fork_marks=("ess_ratio",),
    klinic_records=SLIME_DUMP,
    why_none={"kl": "without --use-kl-loss miles logs none"},
)
MS_SWIFT = Trainer(
    name="ms-swift",
    source="ms-swift 3602360a5: swift/rlhf_trainers/grpo_trainer.py:439-442, 1193, 1242, 2491, "
    "trainers/patcher.py:18-30",
    names={**AS_TRL, "entropy/mean": "entropy", "rollout_correction/k3_kl": "sampler/kl"},
    marks=(*TRL.marks, "memory(GiB)", "train_speed(s/it)"),
    fork_of="TRL",
    fork_marks=("train_speed(s/it)",),
    has_k3=True,
    klinic_records="Set `--log_completions true`: `completions.jsonl` in the output folder has "
    "texts, rewards and advantages, and `klinic diagnose OUTPUT_DIR` reads it.",
    why_none={"kl": "at beta 0 ms-swift has no reference and logs none"},
)
UNSLOTH = Trainer(
    name="Unsloth",
    source="Unsloth 015bdef0d9: unsloth/models/rl_replacements.py:2901-2995",
    names=AS_TRL,
    marks=(*TRL.marks, "completion_length"),
    fork_of="TRL",
    fork_marks=("completion_length", "completions/mean_length"),
    has_k3=True,
    drops_nan=True,
    klinic_records="Set `log_completions=True`: the parquet files in OUTPUT_DIR/completions have "
    "texts, rewards and advantages, and `klinic diagnose OUTPUT_DIR` reads them.",
    why_none={"kl": "at beta 0 Unsloth has no reference and logs 0"},
    zero_is_none=("kl",),
)
AREAL = Trainer(
    name="AReaL",
    source="AReaL 4aef98d8d: areal/trainer/ppo/actor.py:252-365, 523-570, 1046-1062, "
    "utils/stats_tracker.py:191",
    names={
        "ppo_actor/update/actor_loss/avg": "loss",
        "ppo_actor/update/grad_norm": "grad_norm",
        "ppo_actor/update/lr": "learning_rate",
        "ppo_actor/task_reward/avg": "reward",
        "ppo_actor/task_reward/min": "reward/min",
        "ppo_actor/task_reward/max": "reward/max",
        "ppo_actor/advantages/min": "advantage/min",
        "ppo_actor/advantages/max": "advantage/max",
        "ppo_actor/update/entropy/avg": "entropy",
        # of the policy that trains against the one that sampled
        "ppo_actor/update/compute_logp/kl_div_dual/avg": "sampler/kl",
        "ppo_actor/update/version_stats/sample_staleness_theta_max": "staleness/max",
    },
    marks=(
        *("ppo_actor/update/importance_weight/avg", "ppo_actor/update/clip_ratio/avg"),
        *("ppo_actor/seq_len/avg", "ppo_actor/no_eos_ratios/avg", "ppo_actor/kl_rewards/avg"),
        *("ppo_actor/update/new_logp/avg", "ppo_actor/update/old_logp/avg", "rollout/reward"),
    ),
    klinic_records="Set `rollout.dump_to_file=true`: the folder of the trajectories has texts, "
    "rewards and weight versions.",
    why_none={"kl": "AReaL logs the KL only inside kl_rewards, times its coefficient"},
)
ROLLOUTS = Trainer(
    name="verl",
    names={
        name: name
        for name in ("reward", "reward_std", "frac_reward_zero_std", "completions/equal_ratio")
    },
    klinic_records=WRITE,
)

TRAINERS = (
    *(TRL, KLINIC, VERL, OPENRLHF, PRIME_RL, TINKER, NEMO_RL, SLIME, SKYRL, OPEN_INSTRUCT),
    *(AREAL, MILES, MS_SWIFT, UNSLOTH),
)
UNRECOGNISED = Trainer(
    name="an unrecognised trainer",
    # of conflicting meanings, that of the first trainer
    names={name: own for t in reversed(TRAINERS) for name, own in t.names.items()},
    klinic_records="`klinic.Recorder` records a loop of your own: docs/how-to/plain-loop.md.",
    recognised=False,
)
