"""The sections of a recipe. A key left out has the default given here.

Without a `kl` section there is no reference. A non-finite loss, gradient or weight is always an
anomaly; every other limit of the `recovery` section is off by default.
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from klinic.maths.kl_coef import Rule
from klinic.recipe.record_budget import parse_record_budget
from klinic.recipe.rewards import Rewards
from klinic.recipe.section import MAX_COUNT, Count, CountOrZero, Section, Seed, Text, within

# literal, for editors and type checkers; a test compares it with the registry
EstimatorName = Literal[
    "unbiased",
    "exact",
    "topk",
    "sequence",
    "k1",
    "k2",
    "k3",
    "k3_plus",
    "k3_ratio",
    "k3_reversed",
    "abs",
    "k1_reward",
    "k1_reward_immediate",
    "exp_k1_reward",
]
MULTIPLICATIVE = frozenset({"band", "ziegler", "log_pi"})


class KLSection(Section):
    """Coefficient, estimator and controller of the KL term."""

    coef: Annotated[float, within("a negative one rewards leaving the reference", low=0)] = 0.01
    """Factor of the KL term (beta in papers); 0 trains without it."""
    estimator: EstimatorName = "unbiased"
    """KL estimator; `klinic verify` proves which gradient each one has."""
    controller: Rule = "fixed"
    """How the coefficient changes: fixed, or adapted to keep the KL at `target`."""
    target: Annotated[float, within("it is the mean KL to hold, in nats per token", above=0)] = 0.05
    """Mean KL(policy || reference) that a controller aims for, in nats per token."""
    max_coef: Annotated[float, within("it is the largest coefficient to use", above=0)] = 100.0
    """Upper bound of the coefficient under a controller; staying there raises a warning."""
    warmup_steps: CountOrZero = 0
    """Steps of linear warm-up of the coefficient from 0."""
    rollout_limit: Annotated[float, within("it is a KL in nats", above=0)] | None = None
    """A completion whose summed KL to the reference is above this, in nats, has only a KL term;
    needs the sampler's log-probs; null: off."""
    monitor_every: CountOrZero = 0
    """At coefficient 0, steps between KL measurements; 0: never."""

    @property
    def needs_reference(self) -> bool:
        """Whether the run ever scores the reference policy."""
        is_monitored = self.monitor_every > 0 or self.rollout_limit is not None
        return self.coef > 0 or self.controller != "fixed" or is_monitored

    @model_validator(mode="after")
    def _check_controller(self) -> "KLSection":
        if self.controller == "fixed" and "target" in self.model_fields_set:
            raise ValueError(
                f"kl.target is {self.target} with kl.controller fixed: a fixed coefficient has no "
                "target. Use kl.controller band, ziegler, dual_ascent or log_pi, or remove "
                "kl.target."
            )
        if self.controller in MULTIPLICATIVE and self.coef == 0:
            raise ValueError(
                f"kl.coef is 0 with kl.controller {self.controller}: this controller multiplies "
                "the coefficient, so 0 would stay 0. Start above 0 (0.01 is the default), or use "
                "kl.controller dual_ascent, which adds."
            )
        if self.coef > self.max_coef:
            raise ValueError(
                f"kl.coef is {self.coef} and kl.max_coef {self.max_coef}: the coefficient would "
                "start above its limit. Lower kl.coef or raise kl.max_coef."
            )
        return self


class ClusterSection(Section):
    """Ray processes, restarted when they die. `learner.shards` sets the number of learners."""

    samplers: Count = 1
    """Number of sampler processes, each with a copy of the policy's weights."""
    reward_workers: CountOrZero = 0
    """Number of processes that call reward functions; 0: the driver process calls them."""
    max_staleness: CountOrZero = 0
    """Steps by which sampling may run ahead of training; 0: they alternate."""
    address: Text | None = None
    """Head node of a running Ray cluster, host:port; null starts a local one for the run."""


class DataSection(Section):
    """A built-in task or a user's dataset."""

    task: Text | None = None
    """A built-in task, such as `arithmetic`, with prompts, rewards and held-out questions."""
    skill: Text | None = None
    """The skill of the task to train; null: the task's default."""
    path: Text | None = None
    """A JSONL, JSON, CSV or Parquet file, or a folder or hub id as `name,config,split`."""
    map: Text | None = None
    """`file.py:function` that maps a row to one with a `prompt`; null if rows have one."""

    @model_validator(mode="after")
    def _one_source(self) -> "DataSection":
        if (self.task is None) == (self.path is None):
            problem = "neither data.task nor data.path is" if self.task is None else "both are"
            raise ValueError(
                f"data needs exactly one source of prompts, and {problem} set. Set data.task "
                "(`arithmetic` is built in) or data.path (a file or a hub id), not both."
            )
        name = "skill" if self.path else "map"
        if getattr(self, name) is not None:
            raise ValueError(
                f"data.{name} does not apply to data.{'path' if self.path else 'task'}: skills "
                f"belong to tasks, map functions to datasets. Remove data.{name}."
            )
        return self


class EvalSection(Section):
    """Held-out prompts of the trained skill."""

    path: Text
    """Held-out prompts, in the format of `data.path`; `data.map` applies to them too."""
    rewards: Rewards = ()
    """Reward functions for evaluation; empty: those of training."""


class RetentionSection(Section):
    """Prompts of other skills, to measure forgetting."""

    path: Text
    """Prompts of other skills, in the format of `data.path`."""
    rewards: Rewards
    """Reward functions for these prompts."""


# literals, for editors and type checkers; tests compare them with the registries of klinic.maths
LossName = Literal["grpo", "dr_grpo", "bnpo", "dapo", "gspo", "cispo"]
AdvantageName = Literal["none", "group_mean", "leave_one_out", "group_std", "batch"]
ImportanceSamplingName = Literal[
    "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]


class LearnerSection(Section):
    """Loss, advantages, optimizer and batching."""

    loss: LossName = "dr_grpo"
    """Policy-gradient loss and its aggregation over tokens."""
    advantage: AdvantageName = "leave_one_out"
    """Baseline and scale of rewards; changes the effective strength of `kl.coef`."""
    clip_low: Annotated[float, within("the ratio is held above 1 - clip_low", above=0, high=1)] = (
        0.2
    )
    """The ratio to the learner's own policy before the first update is clipped at 1 - clip_low."""
    clip_high: Annotated[float, within("the ratio is held below 1 + clip_high", above=0)] = 0.2
    """The ratio to the learner's own policy before the first update is clipped at 1 + clip_high."""
    importance_sampling: ImportanceSamplingName = "auto"
    """Weights of completions that another policy sampled, by token or completion, truncated or
    masked at the cap; auto: `token_truncate` with `cluster.max_staleness`, else `none`."""
    importance_sampling_cap: Annotated[float, within("it is the largest weight", above=0)] = 2.0
    """Cap of the importance weights, in the policy term and in the KL term."""
    learning_rate: Annotated[float, within("a negative one climbs the loss", low=0)] = 1e-6
    """Learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate until `loop.max_steps`."""
    warmup_steps: CountOrZero = 0
    """Steps of linear warm-up of the learning rate from 0."""
    reward_warmup_steps: CountOrZero = 0
    """Steps of linear warm-up of the advantages from 0; the KL term is not scaled."""
    weight_decay: Annotated[float, within("a negative one makes weights grow", low=0)] = 0.0
    """Weight decay of AdamW."""
    adam_beta1: Annotated[float, within("it is the decay of a mean", low=0, below=1)] = 0.9
    """Decay of AdamW's mean of gradients."""
    adam_beta2: Annotated[float, within("it is the decay of a mean", low=0, below=1)] = 0.999
    """Decay of AdamW's mean of squared gradients."""
    max_grad_norm: Annotated[float, within("gradients of norm 0 change nothing", above=0)] = 1.0
    """Gradients are clipped to this norm."""
    updates_per_batch: Count = 1
    """Optimizer updates per batch of completions."""
    micro_batch_size: Count = 8
    """Completions of maximum length per forward and backward pass, more if shorter: affects
    memory, not the result."""
    shards: Count = 1
    """Number of FSDP2 processes that shard the weights; 1: no sharding."""
    replicas: Count = 1
    """Number of sets of `shards` processes; each set holds all weights and gathers them alone."""
    mask_truncated: bool = False
    """Whether completions truncated at the length limit are masked out of the policy term."""
    overlong_buffer: CountOrZero = 0
    """Tokens before the limit over which a penalty grows from 0 to -1; 0: no penalty."""

    @property
    def num_ranks(self) -> int:
        """Number of learner processes."""
        return self.shards * self.replicas


class LoopSection(Section):
    """Steps, batch size, and the intervals of evaluation and checkpoints."""

    max_steps: Count = 100
    """Number of training steps, counted from 1."""
    prompts_per_step: Count = 8
    """Prompts per step."""
    group_size: Annotated[
        int,
        within(
            "a group of one has zero advantage everywhere, so nothing is learned",
            low=2,
        ),
        within("it is a count", high=MAX_COUNT),
    ] = 8
    """Completions per prompt; advantages are computed within the group."""
    extra_rounds: CountOrZero = 0
    """Extra batches sampled while groups have equal rewards (dynamic sampling), which biases the
    measured KL and its gradient; 0: none."""
    eval_every: CountOrZero = 0
    """Steps between evaluations; 0: only at the end."""
    eval_prompts: Count = 200
    """Held-out prompts per skill in an evaluation."""
    checkpoint_every: CountOrZero = 50
    """Steps between checkpoints; 0: only at the end."""
    keep_checkpoints: Annotated[
        int,
        within("a damaged checkpoint needs a predecessor to fall back on", low=2),
        within("it is a count", high=MAX_COUNT),
    ] = 2
    """Number of most recent checkpoints to keep on disk."""
    show_completions_every: CountOrZero = 0
    """Steps between printing of sample completions with rewards; 0: never."""


DEVICE_PATTERN = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d{1,3})?")


def _check_device(value: str) -> str:
    if not DEVICE_PATTERN.fullmatch(value):
        raise ValueError(
            "this is not a device. Use auto, cpu, cuda, cuda:N (N counts from 0) or xpu"
        )
    return value


class ModelSection(Section):
    """The policy to train."""

    name: Text
    """`tiny`, `tiny-small` or `tiny-gpt2` (built-in character models, no download), a folder, or a
    hub id."""
    device: Annotated[str, AfterValidator(_check_device)] = "auto"
    """Device of policy, reference and sampler in one process: `auto`, `cpu`, `cuda`, `cuda:N`,
    `xpu`; auto: the accelerator if there is one."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of matrix products, but for the head: fp32, or bf16 operands and fp32 sums for a
    trained head on one GPU. Trained weights and log-probs are always fp32."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flex_attention"] = "auto"
    """Attention kernel; auto: the one that transformers selects. Rows are packed without padding
    with `flash_attention_2` (needs its package, a GPU and bf16) and `flex_attention` (a GPU)."""
    trust_remote_code: bool = False
    """Whether to run Python code that comes with the model."""
    lora_rank: Count | None = None
    """Rank of a new LoRA adapter; null trains all weights, or the adapter in `name`."""
    lora_alpha: Count | None = None
    """LoRA alpha; null: 2 x rank."""
    lora_target_modules: Annotated[tuple[Text, ...], Field(strict=False, min_length=1)] | None = (
        None
    )
    """Names of the layers that get an adapter; null: every linear layer except the head."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    compile: bool = False
    """Compile the model with torch.compile."""

    @model_validator(mode="after")
    def _check_lora(self) -> "ModelSection":
        if self.lora_target_modules is not None and self.lora_rank is None:
            raise ValueError(
                "model.lora_target_modules is set without model.lora_rank: there are no adapters "
                "to place. Set model.lora_rank (16 is usual), or remove model.lora_target_modules."
            )
        if self.lora_alpha is not None and self.lora_rank is None:
            raise ValueError(
                f"model.lora_alpha is {self.lora_alpha} without model.lora_rank: there are no "
                "adapters to scale. Set model.lora_rank (16 is usual), or remove model.lora_alpha."
            )
        return self


MAX_PROJECT_LENGTH = 128
TrackerName = Literal["tensorboard", "wandb", "trackio"]

INVALID_PROJECT_CHARS = r"/\#?%:"


def _check_project(value: str) -> str:
    if len(value) > MAX_PROJECT_LENGTH or any(char in value for char in INVALID_PROJECT_CHARS):
        raise ValueError(
            f"W&B refuses it. Use at most {MAX_PROJECT_LENGTH} characters, and none of "
            f"{' '.join(INVALID_PROJECT_CHARS)}"
        )
    return value


Project = Annotated[Text, AfterValidator(_check_project)]


def _check_record_budget(value: int | str) -> int | str:
    parse_record_budget(value)
    return value


RecordBudgetText = Annotated[int | str, AfterValidator(_check_record_budget)]


class OutputSection(Section):
    """Run folder, metrics sinks, records and doctor."""

    dir: Text | None = None
    """Run folder, or a URL where the run is published; null: `runs/` and the recipe's name."""
    trackers: Annotated[tuple[TrackerName, ...], Field(strict=False)] = ("tensorboard",)
    """Metrics sinks in addition to the console: any of `tensorboard`, `wandb`, `trackio`."""
    project: Project = "klinic"
    """Project name in W&B and trackio; the run is named after its folder."""
    records_every: CountOrZero = 1
    """Steps between per-token step records; 0: none."""
    keep_records: RecordBudgetText | None = None
    """Records to keep, in steps or as a size (`20 GB`), and evidence of causes; null: all."""
    doctor: Literal["tell", "stop", "none"] = "tell"
    """Test every step for known causes: `tell` prints a finding, `stop` ends the run, or `none`."""


class RecoverySection(Section):
    """Anomaly limits and back-off. `recovery: null` only discards non-finite updates."""

    kl_limit: Annotated[float, within("it is a KL in nats per token", above=0)] | None = None
    """Anomaly above this KL(policy || reference), smoothed over five steps; null: no limit."""
    update_kl_limit: Annotated[float, within("it is a KL in nats per token", above=0)] | None = None
    """KL(new || old) per token above which the updates on a batch stop; null: no limit."""
    grad_norm_limit: (
        Annotated[float, within("a smaller one would stop usual gradients", above=1)] | None
    ) = None
    """Anomaly above this multiple of the 90% quantile of recent gradient norms; null: no limit."""
    reward_drop: Annotated[float, within("it is a fall of the reward", above=0)] | None = None
    """Anomaly if the smoothed reward falls this far below its best, or a batch below its noise."""
    lr_factor: Annotated[
        float, within("the learning rate is multiplied by it", above=0, high=1)
    ] = 0.1
    """Factor of the learning rate after an anomaly that a retry does not clear."""
    lr_steps: Count = 50
    """Steps for which the factor applies; each further anomaly adds as many."""
    max_consecutive: Count = 5
    """Consecutive anomalous batches after which the run stops with a diagnosis."""


class ReferenceSection(Section):
    """The reference policy; by default the initial policy, fixed for the whole run."""

    path: Text | None = None
    """A folder or a hub id; null: the initial policy, after the warm start if there is one."""
    ema: Annotated[float, within("it is the decay of the moving average", low=0, below=1)] = 0.0
    """After every step, reference = ema x reference + (1 - ema) x policy; 0: fixed."""
    reset_every: CountOrZero = 0
    """Steps between resets of the reference to the policy; 0: never."""
    on_plateau: bool = False
    """Reset only if the reward of the last `reset_every` steps has not improved."""
    reset_optimizer: bool = False
    """Whether a reset also clears the moments of AdamW."""

    @property
    def moves(self) -> bool:
        """Whether the reference ever changes."""
        return self.ema > 0 or self.reset_every > 0

    @model_validator(mode="after")
    def _check_updates(self) -> "ReferenceSection":
        if self.ema and self.reset_every:
            raise ValueError(
                f"reference.ema is {self.ema} and reference.reset_every is {self.reset_every}: a "
                "reference either averages the policy or is reset to it. Keep one."
            )
        for name in ("on_plateau", "reset_optimizer"):
            if getattr(self, name) and not self.reset_every:
                raise ValueError(
                    f"reference.{name} is true without reference.reset_every: it only affects "
                    "resets. Set reference.reset_every to a number of steps."
                )
        return self


class TeacherSection(Section):
    """On-policy distillation: a KL term to a teacher, on the policy's own samples."""

    path: Text
    """A folder or a hub id of a model with the policy's tokenizer."""
    coef: Annotated[float, within("without it the teacher has no effect", above=0)] = 1.0
    """Factor of KL(policy || teacher) in the loss."""
    estimator: EstimatorName = "exact"
    """Estimator of the KL to the teacher, one of those of `kl.estimator`."""
    alone: bool = False
    """Whether the KL to the teacher replaces the rewards in the loss; they are still measured."""


class SamplerSection(Section):
    """The engine. The `sampling` section sets the distribution for all engines."""

    type: Literal["transformers", "vllm"] = "transformers"
    """`transformers` samples in this process with the trained weights; `vllm` in a vLLM engine."""
    server: Text | None = None
    """URL of a running vLLM server; null starts an engine for the run."""
    gpu_memory_utilization: (
        Annotated[float, within("it is a fraction of the GPU's memory", above=0, high=1)] | None
    ) = None
    """Fraction of a GPU's memory for an engine of the run; null: 0.4 beside a learner on the same
    GPU, else vLLM's default."""
    sleep_level: Literal["auto", 0, 1, 2] = "auto"
    """GPU memory that the engine releases while the learner trains; 0: none, 1: cache and weights,
    which stay in host memory, 2: both, weights are sent again; auto: 2 if the learner uses the
    same GPU, 1 with an adapter, else 0."""
    tensor_parallel_size: Count = 1
    """GPUs of one machine over which an engine splits the weights."""


class SamplingSection(Section):
    """Sampling parameters. A model's own generation config is ignored."""

    temperature: Annotated[
        float, within("greedy completions are all equal, so no advantage remains", above=0)
    ] = 1.0
    """Divisor of the logits; log-probs are computed from the divided logits."""
    top_p: Annotated[float, within("it is a cumulative probability", above=0, high=1)] = 1.0
    """Keep the likeliest tokens up to this cumulative probability; 1: off."""
    top_k: CountOrZero = 0
    """Keep this many of the likeliest tokens; 0: off."""
    min_p: Annotated[float, within("it is a fraction of the top probability", low=0, below=1)] = 0.0
    """Drop tokens with less than this fraction of the top token's probability; 0: off."""
    max_new_tokens: Count = 256
    """Maximum tokens of a completion, over all turns of the policy."""
    reply: Text | None = None
    """`file.py:function` that returns the environment's reply; null: single-turn."""


class WarmStartSection(Section):
    """Supervised training before the first step; its result becomes the reference."""

    steps: Count = 1000
    """Number of supervised updates."""
    batch_size: Count = 64
    """Examples per update."""
    learning_rate: Annotated[float, within("a negative one climbs the loss", low=0)] = 1e-3
    """Learning rate of AdamW."""
    path: Text | None = None
    """JSONL file with `prompt` and `completion`; null: the task's own examples."""
    seed: Seed = 0
    """Seed of the examples and their order: different starts for `klinic ablate --starts`."""
