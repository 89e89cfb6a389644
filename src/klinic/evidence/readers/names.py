"""What each trainer calls its metrics, and what klinic calls them.

loss                       value of the whole loss
grad_norm                  before clipping
learning_rate
reward, reward_std         of the completions of a step; reward/min, reward/max
frac_reward_zero_std       share of the groups whose rewards are all the same
advantage/min, /max        as the loss used it
kl                         of policy against reference, an estimate that is never negative
kl_k1/mean                 the same as a mean of log-ratios, which can be
entropy                    nats per token
frac_mixed                 share of the groups whose rewards differ
completions/clipped_ratio  share of the completions that ran into the length limit
completions/equal_ratio    share of the completions that are another one of their group again
sampler/gap                mean of |log-prob of the sampler - that of the learner|, nats
sampler/kl                 mean of half its square, or k3 of it
sampler/prob_gap           mean of |probability of the sampler - that of the learner|
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

TRAIN = "train/"  # what transformers puts before every name for TensorBoard and W&B


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A trainer and its names."""

    name: str
    names: Mapping[str, str]
    """Its own, each with klinic's."""
    marks: tuple[str, ...] = ()
    """Others of its own that tell it from the rest."""
    drops_nan: bool = False
    """Whether it leaves out what is not a number: then what is missing in the middle was none."""
    klinic_records: str = ""
    """How to get token-level records of it."""
    why_none: Mapping[str, str] = field(default_factory=dict)
    """Why a metric, by klinic's name, may not be logged although all is well."""

    def klinic_name(self, name: str) -> str | None:
        """Return what klinic calls a metric; None where it does not know it."""
        return self.names.get(name) or self.names.get(name.removeprefix(TRAIN))

    def num_known(self, names: Iterable[str]) -> int:
        """Return how many names of a log are its own."""
        bare = [name.removeprefix(TRAIN) for name in names]
        return sum(name in self.names or name in self.marks for name in bare)


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
"""klinic calls most of what it logs as TRL does."""

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
ROLLOUTS = Trainer(
    name="verl",
    names={
        name: name
        for name in ("reward", "reward_std", "frac_reward_zero_std", "completions/equal_ratio")
    },
    klinic_records=WRITE,
)

TRAINERS = (TRL, KLINIC, VERL, OPENRLHF, PRIME_RL, TINKER)


def trainer_of(found: Iterable[str]) -> Trainer:
    """Return the trainer that most names of a log are of; the first of several.

    >>> trainer_of(["loss", "kl", "completions/mean_length"]).name, trainer_of(["optim/lr"]).name
    ('TRL', 'prime-rl')
    """
    names = list(found)
    return max(TRAINERS, key=lambda trainer: trainer.num_known(names))
