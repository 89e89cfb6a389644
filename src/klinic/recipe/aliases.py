"""Aliases: setting names of other trainers, mapped to recipe keys.

`ALIASES` maps a name to a key, or to a function from its value to an `AliasTarget`. `REFUSED` holds
the names that have no counterpart, each with advice. Dashes and underscores are equivalent.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from klinic.recipe.sections import EstimatorName, TrackerName

TRACKERS = get_args(TrackerName)

DYNAMIC_ROUNDS = 9  # with the first, the ten batches that DAPO allows a step


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasTarget:
    """The keys that an alias sets for a given value."""

    sets: Mapping[str, Any]
    """Keys and their values; a section is set to {} (enabled) or None (disabled)."""
    unless_explicit: Mapping[str, Any] = field(default_factory=dict)
    """Keys that are set unless the same source sets them explicitly."""
    unless_set: Mapping[str, Any] = field(default_factory=dict)
    """Keys that are set unless any source sets them."""


def _kl_penalty(value: Any) -> AliasTarget:
    if value in get_args(EstimatorName):
        return AliasTarget(sets={"kl.estimator": value})
    if isinstance(value, bool | str):
        raise ValueError(
            "it must be a coefficient (0.01) or an estimator name (k3). "
            "To switch the KL on or off, use use_kl_penalty"
        )
    return AliasTarget(sets={"kl.coef": value})


def _use_kl(value: Any) -> AliasTarget:
    return AliasTarget(sets={"kl": {} if _parse_flag(value) else None})


def _target_kl(value: Any) -> AliasTarget:
    return AliasTarget(sets={"kl.target": value}, unless_set={"kl.controller": "band"})


def _both_bounds(value: Any) -> AliasTarget:
    return AliasTarget(
        sets={"learner.clip_low": value}, unless_explicit={"learner.clip_high": value}
    )


def _set_bf16(value: Any) -> AliasTarget:
    return AliasTarget(sets={"model.dtype": "bf16" if _parse_flag(value) else "fp32"})


def _flash_attention(value: Any) -> AliasTarget:
    return AliasTarget(
        sets={"model.attention": "flash_attention_2" if _parse_flag(value) else "auto"}
    )


def _use_cpu(value: Any) -> AliasTarget:
    return AliasTarget(sets={"model.device": "cpu" if _parse_flag(value) else "auto"})


def _report_to(value: Any) -> AliasTarget:
    """Accept one tracker name or a list of names; `all` and `none` are allowed too."""
    names = ["none"] if value is None else [value] if isinstance(value, str) else value
    allowed = (*TRACKERS, "all", "none")
    if not isinstance(names, list) or not all(name in allowed for name in names):
        raise ValueError(f"use one of {', '.join(TRACKERS)}, all or none, or a list of these")
    requested = TRACKERS if "all" in names else names
    return AliasTarget(sets={"output.trackers": [name for name in TRACKERS if name in requested]})


def _dynamic_sampling(value: Any) -> AliasTarget:
    return AliasTarget(sets={"loop.extra_rounds": DYNAMIC_ROUNDS if _parse_flag(value) else 0})


def _use_vllm(value: Any) -> AliasTarget:
    return AliasTarget(sets={"sampler.type": "vllm" if _parse_flag(value) else "transformers"})


def _vllm_server(value: Any) -> AliasTarget:
    return AliasTarget(sets={"sampler.server": value}, unless_explicit={"sampler.type": "vllm"})


def _sleep(value: Any) -> AliasTarget:
    return AliasTarget(sets={"sampler.sleep_level": "auto" if _parse_flag(value) else 0})


def _corrects_sampler(value: Any) -> AliasTarget:
    """Accept TRL's switch, with its default mode."""
    if not _parse_flag(value):
        return AliasTarget(sets={"learner.importance_sampling": "none"})
    return AliasTarget(sets={}, unless_explicit={"learner.importance_sampling": "sequence_mask"})


def _rollout_is(value: Any) -> AliasTarget:
    """Accept verl's levels, which truncate."""
    if value not in ("token", "sequence", None):
        raise ValueError("use token, sequence or null")
    mode = "none" if value is None else f"{value}_truncate"
    return AliasTarget(sets={"learner.importance_sampling": mode})


def _tis_cap(value: Any) -> AliasTarget:
    return AliasTarget(
        sets={"learner.importance_sampling_cap": value},
        unless_set={"learner.importance_sampling": "token_truncate"},
    )


def _set_learners(value: Any) -> AliasTarget:
    return AliasTarget(sets={"learner.shards": value, "cluster": {}})


def _parse_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("it must be true or false")
    return value


ALIASES: dict[str, str | Callable[[Any], AliasTarget]] = {
    "cluster.learners": _set_learners,
    "use_vllm": _use_vllm,
    "vllm_server_base_url": _vllm_server,
    "gpu_mem_util": "sampler.gpu_memory_utilization",
    "gpu_memory_utilization": "sampler.gpu_memory_utilization",
    "vllm_gpu_memory_utilization": "sampler.gpu_memory_utilization",
    "vllm_enable_sleep_mode": _sleep,
    "free_cache_engine": _sleep,
    "vllm_tensor_parallel_size": "sampler.tensor_parallel_size",
    "tensor_model_parallel_size": "sampler.tensor_parallel_size",
    "tensor_parallel_size": "sampler.tensor_parallel_size",
    "kl_coef": "kl.coef",
    "kl_beta": "kl.coef",
    "beta": "kl.coef",
    "kl_coefficient": "kl.coef",
    "init_kl_coef": "kl.coef",
    "kl_penalty": _kl_penalty,
    "use_kl_penalty": _use_kl,
    "use_kl_loss": _use_kl,
    "target_kl": _target_kl,
    "kl_target": _target_kl,
    "kl_warmup_steps": "kl.warmup_steps",
    "rollout_kl_limit": "kl.rollout_limit",
    "kl.reference": "reference.path",
    "ref_model": "reference.path",
    "teacher_model": "teacher.path",
    "teacher_model_name_or_path": "teacher.path",
    "recovery_lr_factor": "recovery.lr_factor",
    "max_consecutive_nans": "recovery.max_consecutive",
    "reward_warmup_steps": "learner.reward_warmup_steps",
    "kl_estimator": "kl.estimator",
    "num_generations": "loop.group_size",
    "group_size": "loop.group_size",
    "n": "loop.group_size",
    "batch_size": "loop.prompts_per_step",
    "prompts_per_step": "loop.prompts_per_step",
    "num_prompts": "loop.prompts_per_step",
    "max_steps": "loop.max_steps",
    "total_steps": "loop.max_steps",
    "n_grpo_steps": "loop.max_steps",
    "dynamic_sampling": _dynamic_sampling,
    "overlong_buffer_len": "learner.overlong_buffer",
    "soft_punish_cache": "learner.overlong_buffer",
    "save_steps": "loop.checkpoint_every",
    "save_total_limit": "loop.keep_checkpoints",
    "eval_steps": "loop.eval_every",
    "learning_rate": "learner.learning_rate",
    "lr": "learner.learning_rate",
    "lr_scheduler_type": "learner.schedule",
    "warmup_steps": "learner.warmup_steps",
    "weight_decay": "learner.weight_decay",
    "adam_beta1": "learner.adam_beta1",
    "adam_beta2": "learner.adam_beta2",
    "max_grad_norm": "learner.max_grad_norm",
    "loss_type": "learner.loss",
    "clip_range": _both_bounds,
    "cliprange": _both_bounds,
    "epsilon": _both_bounds,
    "epsilon_high": "learner.clip_high",
    "clip_ratio_high": "learner.clip_high",
    "clip_ratio_low": "learner.clip_low",
    "num_iterations": "learner.updates_per_batch",
    "mu": "learner.updates_per_batch",
    "epochs_per_rollout_batch": "learner.updates_per_batch",
    "ppo_epochs": "learner.updates_per_batch",
    "vllm_importance_sampling_correction": _corrects_sampler,
    "vllm_importance_sampling_mode": "learner.importance_sampling",
    "vllm_importance_sampling_cap": "learner.importance_sampling_cap",
    "vllm_importance_sampling_clip_max": "learner.importance_sampling_cap",
    "rollout_is": _rollout_is,
    "rollout_is_threshold": "learner.importance_sampling_cap",
    "tis_imp_ratio_cap": _tis_cap,
    "truncated_importance_sampling_ratio": _tis_cap,
    "mask_truncated_completions": "learner.mask_truncated",
    "max_completion_length": "sampling.max_new_tokens",
    "max_new_tokens": "sampling.max_new_tokens",
    "max_tokens": "sampling.max_new_tokens",
    "sampling_max_tokens": "sampling.max_new_tokens",
    "temperature": "sampling.temperature",
    "sampling_temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "model_name_or_path": "model.name",
    "model_name": "model.name",
    "model_id": "model.name",
    "bf16": _set_bf16,
    "device": "model.device",
    "attn_implementation": "model.attention",
    "attention_implementation": "model.attention",
    "flash_attn": _flash_attention,
    "flash_attention": _flash_attention,
    "use_cpu": _use_cpu,
    "no_cuda": _use_cpu,
    "lora_r": "model.lora_rank",
    "lora_rank": "model.lora_rank",
    "lora_alpha": "model.lora_alpha",
    "lora_target_modules": "model.lora_target_modules",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "task": "data.task",
    "dataset": "data.path",
    "dataset_path": "data.path",
    "dataset_name": "data.path",
    "datasets": "data.path",
    "data.dataset": "data.path",
    "eval.dataset": "eval.path",
    "eval_dataset": "eval.path",
    "eval_path": "eval.path",
    "retention.dataset": "retention.path",
    "reward_funcs": "rewards",
    "reward_functions": "rewards",
    "eval.reward_funcs": "eval.rewards",
    "retention.reward_funcs": "retention.rewards",
    "output_dir": "output.dir",
    "save_dir": "output.dir",
    "report_to": _report_to,
}

_STEP = (
    "A step is loop.prompts_per_step prompts x loop.group_size completions: set these two, and "
    "learner.micro_batch_size for memory"
)
_REJECTION = (
    "To leave out tokens or completions whose weight is above learner.importance_sampling_cap, set "
    "learner.importance_sampling to token_mask or sequence_mask"
)

_OBJECT = "It is a Python object, for klinic.train(...)"

REFUSED = {
    "rollout_rs": _REJECTION,
    "rollout_rs_threshold": _REJECTION,
    "vllm_importance_sampling_clip_min": "Importance weights have no lower bound: a small weight "
    "is right for a token that the policy no longer chooses, and raising it adds a bias",
    "importance_sampling_level": "learner.loss: gspo has the ratio of the whole completion, every "
    "other loss that of the token",
    "reward_weights": "Set the weight in the reward entry: rewards: [{function: f, weight: 0.5}]",
    "gradient_accumulation_steps": "It follows from learner.micro_batch_size: set that to the "
    "number of completions that fit into memory; gradients are accumulated over the step",
    "rollout_batch_size": _STEP,
    "train_batch_size": _STEP,
    "per_device_train_batch_size": _STEP,
    "num_train_epochs": "Set loop.max_steps: epochs x rows / loop.prompts_per_step",
    "warmup_ratio": "Set learner.warmup_steps: the ratio x loop.max_steps",
    "train_dataset": "In a recipe the rows are data.path; klinic.train(...) takes rows in memory",
    "processing_class": _OBJECT,
    "peft_config": f"{_OBJECT}. In a recipe set model.lora_rank, model.lora_alpha and "
    "model.lora_target_modules",
    "callbacks": _OBJECT,
    "args": f"{_OBJECT}. In a recipe write its arguments as keys",
    "resume_from_checkpoint": "On a command line it is --resume; klinic.train(...) takes it",
    "push_to_hub": "klinic uploads nothing; klinic export writes a folder that can be uploaded",
    "max_prompt_length": "Prompts are never truncated: one that does not fit the model is refused",
    "run_name": "The run is named after its folder: set output.dir",
    "logging_steps": "Every step is logged; output.records_every sets how often a record is saved",
    "dataset_config": "It is part of the dataset name: data.path: name,config,split",
    "dataset_train_split": "It is part of the dataset name: data.path: name,config,split",
    "dataset_split": "It is part of the dataset name: data.path: name,config,split",
    "lora_dropout": "Dropout is off in training: the sampler applies none, so the log-probs of "
    "learner and sampler would differ",
    "scale_rewards": "Set learner.advantage: group_std divides by the group's standard "
    "deviation, leave_one_out and group_mean do not",
}

FLAGS = frozenset(
    {
        *("use_kl_penalty", "use_kl_loss", "bf16", "dynamic_sampling", "use_vllm"),
        *("vllm_importance_sampling_correction", "use_cpu", "no_cuda"),
        *("flash_attn", "flash_attention"),
        *("vllm_enable_sleep_mode", "free_cache_engine"),
    }
)
"""Aliases whose value is a boolean."""


def canonical_name(name: str) -> str:
    """Normalise a name: strip leading dashes, turn the other dashes into underscores.

    >>> canonical_name("--kl-beta")
    'kl_beta'
    """
    return name.strip().lstrip("-").replace("-", "_")


def resolve_alias(name: str, value: Any) -> AliasTarget:
    """Return the keys that an alias sets; raise ValueError for a value it does not accept."""
    target = ALIASES[name]
    return AliasTarget(sets={target: value}) if isinstance(target, str) else target(value)
