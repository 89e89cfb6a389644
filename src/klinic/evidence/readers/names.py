"""Maps the metric names of each trainer to those of klinic:

loss                       value of the whole loss
grad_norm                  before clipping
learning_rate
reward, reward_std         of the completions of a step; reward/min, reward/max
frac_reward_zero_std       fraction of the groups whose rewards are all equal
advantage/min, /max        as the loss used it
kl                         of policy against reference, by an estimator that is never negative
kl_k1/mean                 the same as a mean of log-ratios, which may be negative
entropy                    nats per token
frac_mixed                 fraction of the groups whose rewards differ
completions/clipped_ratio  fraction of the completions cut off at the length limit
completions/equal_ratio    fraction of the completions that repeat another of their group
sampler/gap                mean of |log-prob of the sampler - that of the learner|, nats
sampler/kl                 mean of half its square, or k3 of it
sampler/prob_gap           mean of |probability of the sampler - that of the learner|
sampler/mult_prob_error    mean of exp(|log-prob of the sampler - that of the learner|), 1 at best

A trainer is recognised by names that no other uses; an unrecognised log is read by all names.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

TRAIN_PREFIX = "train/"  # prefix of transformers, NeMo-RL and slime for TensorBoard and W&B
MIN_OWN_NAMES = 2  # distinctive names that identify a trainer: one may be chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A trainer and its metric names."""

    name: str
    names: Mapping[str, str]
    """Maps its names to klinic's."""
    marks: tuple[str, ...] = ()
    """Further names that identify it."""
    drops_nan: bool = False
    """Whether it omits non-finite values, so that a gap in a column means one."""
    klinic_records: str = ""
    """How to get token-level records from it."""
    why_none: Mapping[str, str] = field(default_factory=dict)
    """By klinic's name of a metric: why a healthy run may not log it."""
    zero_is_none: tuple[str, ...] = ()
    """Metrics, by klinic's name, that are 0 in every step if they are not measured."""
    recognised: bool = True
    """False for the fallback of logs from an unknown trainer."""

    @property
    def all_names(self) -> frozenset[str]:
        """All names by which the trainer may be recognised."""
        return frozenset((*self.names, *self.marks))

    def klinic_name(self, name: str) -> str | None:
        """Return klinic's name of a metric, or None."""
        return self.names.get(name) or self.names.get(name.removeprefix(TRAIN_PREFIX))


WRITE = "Write them from your trainer: docs/how-to/write-evidence.md, 30 lines."

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

KLINIC = Trainer(
    name="klinic",
    names={**AS_TRL, "kl_k1/mean": "kl_k1/mean"},
    marks=("policy_loss", "kl_penalty", "kl_coef", "advantage/max", "time/learn", "update_norm"),
    klinic_records="Train with output.records_every: 1.",
)
TRL = Trainer(
    name="TRL",
    names={**AS_TRL, "klinic/kl_k1/mean": "kl_k1/mean"},
    marks=("completions/mean_length", "num_tokens", "epoch", "clip_ratio/region_mean"),
    drops_nan=True,
    klinic_records="Two lines record them: `import klinic` and `klinic.attach(trainer, "
    '"runs/mine")` before `trainer.train()`.',
    why_none={"kl": "at beta 0 TRL has no reference and logs none"},
)
VERL = Trainer(
    name="verl",
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
    names={
        "policy_loss": "loss",
        "actor_grad_norm": "grad_norm",
        "actor_lr": "learning_rate",
        "reward": "reward",
        "kl": "kl_k1/mean",
        "entropy_loss": "entropy",
        "truncated": "completions/clipped_ratio",
        "vllm_kl": "sampler/kl",
    },
    marks=("ppo_clip_ratio", "ppo_kl", "response_length", "total_length", "return"),
    klinic_records=WRITE,
)
PRIME_RL = Trainer(
    name="prime-rl",
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
    },
    marks=("kl_ent_ratio/mean", "seq_len/all/mean", "time/step"),
    drops_nan=True,
    klinic_records="Set `trainer.enable_token_export = true` and give the folder that has "
    "`token_exports`.",
)
TINKER = Trainer(
    name="tinker",
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
    klinic_records=WRITE,
    why_none={"kl": "with reference_policy_kl_penalty 0 NeMo-RL logs kl_penalty as 0"},
    zero_is_none=("kl",),
)
SLIME = Trainer(
    name="slime",
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
    klinic_records=WRITE,
    why_none={"kl": "without --use-kl-loss slime logs none"},
)
SKYRL = Trainer(
    name="SkyRL",
    names={
        "policy/final_loss": "loss",
        "policy/grad_norm": "grad_norm",
        "policy/policy_lr": "learning_rate",
        "reward/avg_raw_reward": "reward",
        "policy/policy_kl": "kl",
        "loss/avg_kl": "kl",
        "policy/policy_entropy": "entropy",
        "policy/rollout_train_logprobs_abs_diff_mean": "sampler/gap",
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
    names={
        "loss/total_avg": "loss",
        "optim/grad_norm": "grad_norm",
        "lr": "learning_rate",
        "scores": "reward",
        "val/advantages_min": "advantage/min",
        "val/advantages_max": "advantage/max",
        "objective/kl2_avg": "kl",  # numbered from 0: this is k3
        "objective/kl0_avg": "kl_k1/mean",
        "policy/entropy_avg": "entropy",
        "debug/vllm_vs_local_logprob_diff_mean": "sampler/gap",
    },
    marks=(
        *("objective/kl1_avg", "objective/kl3_avg", "loss/policy_avg", "policy/clipfrac_avg"),
        *("val/ratio", "val/stop_rate", "episode", "training_step", "epoch", "time/total"),
        "debug/vllm_local_reverse_kl",
    ),
    klinic_records=WRITE,
    why_none={"kl": "without a reference open-instruct logs objective/kl2_avg as 0"},
    zero_is_none=("kl", "kl_k1/mean"),
)
ROLLOUTS = Trainer(
    name="verl",
    names={
        name: name
        for name in ("reward", "reward_std", "frac_reward_zero_std", "completions/equal_ratio")
    },
    klinic_records=WRITE,
)

TRAINERS = (*(TRL, KLINIC, VERL, OPENRLHF, PRIME_RL, TINKER, NEMO_RL, SLIME, SKYRL, OPEN_INSTRUCT),)
UNRECOGNISED = Trainer(
    name="an unrecognised trainer",
    # of conflicting meanings, that of the first trainer
    names={name: own for t in reversed(TRAINERS) for name, own in t.names.items()},
    klinic_records=WRITE,
    recognised=False,
)


def _shared_names() -> frozenset[str]:
    """Return the names that several trainers use, apart from those of TRL and klinic alone."""
    counts = Counter(name for trainer in TRAINERS for name in trainer.all_names)
    counts.subtract(TRL.all_names & KLINIC.all_names)
    return frozenset(name for name, count in counts.items() if count > 1)


SHARED_NAMES = _shared_names()


def recognise_trainer(metric_names: Iterable[str]) -> Trainer:
    """Return the trainer with most of a log's distinctive names; on a tie `UNRECOGNISED`.

    >>> recognise_trainer(["loss", "kl", "completions/mean_length", "num_tokens"]).name
    'TRL'
    >>> recognise_trainer(["loss", "kl", "reward"]).recognised
    False
    """
    names = frozenset(name.removeprefix(TRAIN_PREFIX) for name in metric_names) - SHARED_NAMES
    first, second, *_ = sorted(
        TRAINERS, key=lambda trainer: len(names & trainer.all_names), reverse=True
    )
    num_own = len(names & first.all_names)
    is_unique = num_own > len(names & second.all_names)
    return first if is_unique and num_own >= MIN_OWN_NAMES else UNRECOGNISED


def trl_or_unrecognised(metric_names: Iterable[str]) -> Trainer:
    """Return TRL if a log of transformers has a distinctive name of TRL."""
    names = frozenset(name.removeprefix(TRAIN_PREFIX) for name in metric_names)
    return TRL if names & TRL.all_names - SHARED_NAMES else UNRECOGNISED
