"""Translates TRL's config into run.json and the recipe keys that exist for it.

Sampling settings are those of `GRPOConfig`. Overrides by the model's generation config or by
`generation_kwargs` are left out on purpose: checks detect them.
"""

from typing import Any

import torch

from klinic.evidence.run_facts import SHARED_FORWARD
from klinic.integrations.trl.reference import TRLReference, unwrap_policy
from klinic.integrations.trl.sharding import is_sharded
from klinic.maths.surrogate import SURROGATES
from klinic.model.adapters import policy_digest
from klinic.model.dropout import max_dropout_rate
from klinic.model.loading import declared_stop_ids, num_experts, num_parameters
from klinic.model.zero_shards import full_shape
from klinic.training.run_facts import run_provenance

ADVANTAGE_NAMES = {"group": "group_std", "batch": "batch", "none": "group_mean"}


def run_facts(
    trainer: Any, reference: TRLReference | None, estimator: str | None
) -> dict[str, Any]:
    """Return the contents of run.json."""
    args, lm = trainer.args, unwrap_policy(trainer)
    return {
        **run_provenance(),
        "seed": args.seed,
        "threads": torch.get_num_threads(),
        "sampling": sampling_settings(args),
        "logprob_mode": "processed",
        "eos_ids": list(trainer.eos_token_ids),
        "declared_eos_ids": list(declared_stop_ids(lm, trainer._tokenizer)),
        "pad_id": trainer._tokenizer.pad_token_id,
        "vocabulary_size": full_shape(lm.get_output_embeddings().weight)[0],
        "policy": {
            "name": model_name(lm),
            "digest": policy_digest(lm),
            "dtype": compute_dtype(trainer),
            "dropout": max_dropout_rate(lm),
            "num_experts": num_experts(lm),
            "untrained": False,
            **num_parameters(lm),
        },
        "reference": _reference_facts(args, reference),
        "sampler": {
            "kind": "vllm" if args.use_vllm else "transformers",
            "dtype": compute_dtype(trainer),
            "max_version_lag": 0,
            "shares_weights": not args.use_vllm,
        },
        "shards": trainer.accelerator.num_processes if is_sharded(trainer) else 1,
        "processes": trainer.accelerator.num_processes,
        "trainer": "trl",
        "estimator": estimator,
        "loss": {
            "name": loss_name(args),
            "clip_low": args.epsilon,
            "clip_high": clip_high(args),
            "aggregation": _aggregation_name(args),
            "overridden": has_own_loss(trainer),
        },
        "advantage": advantage_name(args),
        "group_size": args.num_generations,
        "updates_per_generation": updates_per_generation(args),
        "max_steps": trainer.state.max_steps,  # of this training, also where TRL counts epochs
        "warmup_steps": args.get_warmup_steps(trainer.state.max_steps),
        "logp_old": SHARED_FORWARD if shares_forward(args) else "scored",
    }


def sampling_settings(args: Any) -> dict[str, Any]:
    """Return the sampling settings of the config."""
    return {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k or 0,
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
        "max_new_tokens": args.max_completion_length,
    }


def _reference_facts(args: Any, reference: TRLReference | None) -> dict[str, Any]:
    if reference is None:
        return {"kind": "none", "source": None, "digest": None, "wanted": None}
    is_synced = args.sync_ref_model
    return {
        "kind": reference.kind,
        "source": reference.source,
        "digest": reference.digest,
        "wanted": "start",
        "sync_every": args.ref_model_sync_steps if is_synced else None,
        "ema": 1 - args.ref_model_mixup_alpha if is_synced else None,
    }


def model_name(lm: Any) -> str:
    """Return the name or path that a model was loaded from."""
    return str(lm.config._name_or_path) or type(lm).__name__


def compute_dtype(trainer: Any) -> str:
    """Return the dtype of forward passes."""
    if trainer.args.bf16:
        return "bf16"
    if trainer.args.fp16:
        return "fp16"
    dtype = next(unwrap_policy(trainer).parameters()).dtype
    short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return short.get(dtype, str(dtype).removeprefix("torch."))


def updates_per_generation(args: Any) -> int:
    """Return the number of updates per generation."""
    batches = args.steps_per_generation * args.num_iterations
    return max(1, int(batches // args.gradient_accumulation_steps))


def splits_groups(args: Any) -> bool:
    """Whether an update can contain only part of a group."""
    return bool(args.steps_per_generation > args.gradient_accumulation_steps)


def shares_forward(args: Any) -> bool:
    """Whether the loss's forward pass also provides the old log-probs: TRL's own condition."""
    batches = args.steps_per_generation * args.num_iterations
    return args.gradient_accumulation_steps % batches == 0 and not args.use_vllm


def has_own_loss(trainer: Any) -> bool:
    """Whether the user's trainer class overrides TRL's loss."""
    from trl import GRPOTrainer

    names = ("_compute_loss", "compute_loss")
    return any(getattr(type(trainer), n) is not getattr(GRPOTrainer, n) for n in names)


def loss_name(args: Any) -> str:
    """Return klinic's name of the loss where it has one, else TRL's."""
    if args.importance_sampling_level == "sequence" and args.loss_type == "grpo":
        return "gspo"
    return str(args.loss_type)


def advantage_name(args: Any) -> str | None:
    """Return klinic's name of the advantage; None where groups may be split or not sum to 0."""
    aggregation = getattr(args, "multi_objective_aggregation", "sum_then_normalize")
    if aggregation != "sum_then_normalize" or splits_groups(args):
        return None
    scaling = {True: "group", False: "none"}.get(args.scale_rewards, args.scale_rewards)
    return ADVANTAGE_NAMES.get(scaling)


def estimator_name(args: Any) -> str | None:
    """Return klinic's name of TRL's KL term; `k3_sequence_ratio` exists in TRL only."""
    if args.beta == 0:
        return None
    if not args.use_bias_correction_kl:
        return "k3"
    return "k3_ratio" if args.importance_sampling_level == "token" else "k3_sequence_ratio"


def clip_high(args: Any) -> float:
    """Return the upper half of the clip range."""
    return float(args.epsilon if args.epsilon_high is None else args.epsilon_high)


def _aggregation_name(args: Any) -> str | None:
    surrogate = SURROGATES.get(loss_name(args))
    return None if surrogate is None else surrogate.aggregation


def recipe_values(trainer: Any, folder: str) -> dict[str, Any]:
    """Return the recipe sections that TRL's config maps to."""
    args, lm = trainer.args, unwrap_policy(trainer)
    learner: dict[str, Any] = {
        "clip_low": args.epsilon,
        "clip_high": clip_high(args),
        "learning_rate": args.learning_rate,
        "weight_decay": args.weight_decay,
        "max_grad_norm": args.max_grad_norm,
        "updates_per_batch": updates_per_generation(args),
        "micro_batch_size": args.per_device_train_batch_size,
        "mask_truncated": args.mask_truncated_completions,
    }
    learner |= {"loss": loss_name(args)} if loss_name(args) in SURROGATES else {}
    learner |= {"advantage": name} if (name := advantage_name(args)) is not None else {}
    sampling_section = {
        k: v for k, v in sampling_settings(args).items() if k != "repetition_penalty"
    }
    kl_section = {"kl": {"coef": args.beta, "estimator": estimator_name(args)}} if args.beta else {}
    return {
        "seed": args.seed,
        "model": {"name": model_name(lm), "dtype": compute_dtype(trainer)},
        **kl_section,
        "sampling": sampling_section,
        "loop": {
            "updates_per_generation": updates_per_generation(args),
            "max_steps": trainer.state.max_steps,
            "prompts_per_step": prompts_per_step(trainer),
            "group_size": args.num_generations,
        },
        "learner": learner,
        "output": {"dir": folder},
    }


def prompts_per_step(trainer: Any) -> int:
    """Return the number of prompts per update, in all processes."""
    args, num_processes = trainer.args, trainer.accelerator.num_processes
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * num_processes
    return max(1, int(rows // args.num_generations))
