"""The arguments of TRL's `GRPOConfig` that have no counterpart in a recipe.

`UNUSED` change speed, files or logs: they are accepted and named in one line. `UNAVAILABLE` would
change what is learned: they are refused unless they have a value of `NEUTRAL`.
"""

from typing import Any

_LOGGED = "every step is logged"
_LOADER = "rows are in memory"
_PROCESSES = "klinic starts its own processes: learner.shards"
_ENGINE = "the engine is klinic's own"
_HUB = "klinic uploads nothing"
_LOSS_ONLY = "it belongs to a loss that klinic does not have"
_EVAL = "held-out rows are answered greedily, at the start and the end too"
_MEMORY = "klinic computes in chunks of its own"
_DETERMINISTIC = "a run is deterministic"
_REFERENCE_SYNC = "sync_ref_model is off"

NO_DROPOUT = (
    "dropout stays off: the sampler applies none, so the log-probs of learner and sampler would "
    "differ"
)

UNUSED: dict[str, str] = {
    **dict.fromkeys(
        ("logging_strategy", "logging_first_step", "log_level", "log_level_replica"), _LOGGED
    ),
    **dict.fromkeys(
        ("log_on_each_node", "logging_nan_inf_filter", "disable_tqdm", "logging_dir"), _LOGGED
    ),
    **dict.fromkeys(
        ("num_completions_to_print", "log_unique_prompts", "log_multimodal"),
        "loop.show_completions_every prints completions",
    ),
    "log_completions_hub_repo": _HUB,
    "run_name": "a run has the name of its folder",
    **dict.fromkeys(
        ("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        "output.project names the project",
    ),
    **dict.fromkeys(
        ("hub_model_id", "hub_token", "hub_private_repo", "hub_strategy", "hub_always_push"), _HUB
    ),
    **dict.fromkeys(("hub_revision", "push_to_hub_model_id", "push_to_hub_token"), _HUB),
    **dict.fromkeys(
        (
            *("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory"),
            *("dataloader_persistent_workers", "dataloader_prefetch_factor"),
            *("dataloader_multiprocessing_context", "dataloader_in_order", "dataset_num_proc"),
            *("remove_unused_columns", "label_names", "length_column_name", "group_by_length"),
        ),
        _LOADER,
    ),
    **dict.fromkeys(
        (
            *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
            *("ddp_static_graph", "ddp_backend", "ddp_timeout", "fsdp", "fsdp_config"),
            *("deepspeed", "accelerator_config", "parallelism_config", "local_rank"),
            *("save_on_each_node", "ds3_gather_for_generation", "average_tokens_across_devices"),
        ),
        _PROCESSES,
    ),
    **dict.fromkeys(
        (
            *("per_device_eval_batch_size", "num_generations_eval", "eval_on_start", "eval_delay"),
            *("eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps"),
            *("include_for_metrics", "batch_eval_metrics", "prediction_loss_only"),
            *("bf16_full_eval", "fp16_full_eval", "do_train", "do_eval", "do_predict"),
            *("metric_for_best_model", "greater_is_better"),
        ),
        _EVAL,
    ),
    **dict.fromkeys(
        (
            *("gradient_checkpointing_kwargs", "torch_empty_cache_steps", "use_cache", "tf32"),
            *("use_liger_kernel", "liger_kernel_config", "use_liger_loss", "auto_find_batch_size"),
            *("torch_compile_backend", "torch_compile_mode", "pad_to_multiple_of", "optim_args"),
            *("cast_lm_head_to_fp32", "cache_implementation", "use_transformers_paged"),
            *("use_transformers_continuous_batching", "transformers_continuous_batching_config"),
            *("skip_memory_metrics", "include_num_input_tokens_seen", "include_tokens_per_second"),
            *("debug", "enable_jit_checkpoint", "per_gpu_train_batch_size"),
        ),
        _MEMORY,
    ),
    **dict.fromkeys(
        (
            *("vllm_model_impl", "vllm_server_host", "vllm_server_port", "vllm_server_timeout"),
            *("vllm_group_port",),
            *("vllm_max_model_length", "vllm_max_model_len", "vllm_device", "vllm_dtype"),
            *("vllm_enable_prefix_caching", "vllm_quantization"),
        ),
        _ENGINE,
    ),
    **dict.fromkeys(("full_determinism", "data_seed", "restore_callback_states"), _DETERMINISTIC),
    **dict.fromkeys(
        ("ignore_data_skip", "restore_callback_states_from_checkpoint"),
        "a resumed run continues at its row",
    ),
    **dict.fromkeys(
        (
            *("sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos"),
            *("vespo_k_neg", "vespo_lambda_neg"),
        ),
        _LOSS_ONLY,
    ),
    **dict.fromkeys(
        (
            *("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
            "max_tool_calling_iterations",
        ),
        "the argument that it belongs to is off",
    ),
    **dict.fromkeys(("ref_model_mixup_alpha", "ref_model_sync_steps"), _REFERENCE_SYNC),
    "save_only_model": "a checkpoint holds what a resume needs",
    "save_safetensors": "weights are saved as safetensors",
    "disable_dropout": "dropout is always off",
    "lora_dropout": NO_DROPOUT,
    "max_prompt_length": "prompts are never cut; one that does not fit the model is refused",
    "lr_scheduler_kwargs": "the schedules have no other parameters",
}
"""Accepted, each with the reason why it has no effect."""

_LOSS = "would change the loss. Leave it out"
_SAMPLING = "would change what is sampled, and with it the log-probs"

UNAVAILABLE: dict[str, str] = {
    "chat_template_kwargs": "klinic renders a chat without arguments. Render the prompts first: "
    "tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, ...)",
    "generation_kwargs": f"{_SAMPLING}. Use temperature, top_p, top_k and min_p",
    "repetition_penalty": f"{_SAMPLING} depend on earlier tokens. Leave it out",
    "vllm_structured_outputs_regex": f"{_SAMPLING}. Reward the format instead",
    "vllm_guided_decoding_regex": f"{_SAMPLING}. Reward the format instead",
    "delta": f"two-sided clipping {_LOSS}",
    "top_entropy_quantile": f"a mask by entropy {_LOSS}",
    "entropy_coef": f"an entropy bonus {_LOSS}; klinic logs the entropy",
    "use_adaptive_entropy": f"an entropy bonus {_LOSS}; klinic logs the entropy",
    "off_policy_mask_threshold": "to leave out completions by their weight, set "
    "learner.importance_sampling='sequence_mask' and learner.importance_sampling_cap",
    "vllm_importance_sampling_clip_min": "importance weights have no lower bound: raising a small "
    "weight adds a bias. Leave it out",
    "router_aux_loss_coef": f"a loss of the router {_LOSS}",
    "label_smoothing_factor": f"it {_LOSS}",
    "neftune_noise_alpha": "noise makes log-probs random. Leave it out",
    "optim_target_modules": "AdamW trains every trainable weight. Use peft_config",
    "multi_objective_aggregation": "rewards are weighted, summed, then normalized. Leave it out",
    "shuffle_dataset": "rows are shuffled by the seed in every epoch. Leave it out",
    "train_sampling_strategy": "rows are shuffled by the seed in every epoch. Leave it out",
    "load_best_model_at_end": "a run ends with its last weights. Keep more checkpoints "
    "(save_total_limit), and load the best one: result.folder / 'checkpoints'",
}
"""Refused, each with what to do instead."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "chat_template_kwargs": ({},),
    "generation_kwargs": ({},),
    "repetition_penalty": (1.0,),
    "top_entropy_quantile": (1.0,),
    "entropy_coef": (0.0,),
    "use_adaptive_entropy": (False,),
    "router_aux_loss_coef": (0.0,),
    "label_smoothing_factor": (0.0,),
    "neftune_noise_alpha": (0.0,),
    "multi_objective_aggregation": ("sum_then_normalize",),
    "shuffle_dataset": (True,),
    "train_sampling_strategy": ("random",),
    "load_best_model_at_end": (False,),
}
"""Values with which an unavailable argument changes nothing."""

SCHEDULE_NAMES = frozenset(
    {
        *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"),
        *("generation_batch_size", "num_train_epochs", "max_steps", "warmup_ratio"),
        *("warmup_steps", "save_steps", "save_strategy", "eval_steps", "eval_strategy"),
        *("evaluation_strategy", "logging_steps", "log_completions"),
    }
)
"""Arguments in steps, epochs or batches."""
