"""Fixes in the settings of NeMo-RL (read in its main branch of August 2026)."""

from collections.abc import Mapping

from klinic.doctor.advice.own_teacher import teacher_steps

STEPS: Mapping[str, tuple[str, ...]] = {
    "advantage-explodes": (
        "Set `grpo.adv_estimator.normalize_rewards=false`, or update: the leave-one-out standard "
        "deviation of older versions was rounding error for nearly equal rewards.",
    ),
    "broken-reward": (
        "Call the environment's `step` on one right and one wrong completion of the dataset.",
        "Let verifier failures raise instead of returning 0.",
    ),
    "broken-sampler": (
        "Set `policy.generation.temperature=1.0`, and restrict sampling to the tokenizer's "
        "vocabulary: padded head rows can be sampled.",
    ),
    "cliff-rewards": ("Give partial credit in the environment (`env`).",),
    "clip-range-wrong": ("Set `loss_fn.ratio_clip_min=0.2` and `loss_fn.ratio_clip_max=0.2`.",),
    "context-truncated": (
        "Raise `policy.max_total_sequence_length`, on which `policy.generation.max_new_tokens` "
        "depends.",
        "Set `grpo.overlong_filtering=true`, so that cut completions are not trained on.",
    ),
    "corrupted-sync": (
        "Compare a checksum of every tensor after a refit, by name and shape.",
        "Try another `policy.generation.refit_transport`.",
    ),
    "dropout-in-scoring": (
        "Set `policy.dtensor_cfg.lora_cfg.dropout=0.0` (Megatron: `policy.megatron_cfg.peft."
        "dropout=0.0`) and the model's own dropouts in `policy.hf_config_overrides`.",
    ),
    "entropy-term-wrong": (
        "In an own loss function, subtract the entropy term: the loss is minimised. If the entropy "
        "rises, remove it; explore by `policy.generation.temperature=1.0`.",
    ),
    "equal-rewards": (
        "Call the environment by hand on right and wrong completions: do rewards differ?",
        "Raise `grpo.num_generations_per_prompt`, or set `grpo.use_dynamic_sampling=true`.",
    ),
    "gap-grows-with-position": (
        "Compare rotary scaling and `policy.generation.vllm_cfg.max_model_len` with the model's "
        "config, and set `policy.generation.vllm_cfg.kv_cache_dtype=auto`.",
        "Set `policy.generation.vllm_kwargs.disable_cascade_attn=true`.",
    ),
    "gradient-not-cleared": (
        "In an own policy worker, call `self.optimizer.zero_grad()` before the micro-batches of "
        "every global batch.",
    ),
    "hidden-sampling-transform": (
        "Set `policy.generation.top_p=1.0` and `policy.generation.top_k=null`.",
        "Set `policy.generation.vllm_kwargs.generation_config=vllm`: otherwise the engine takes "
        "penalties from the model's generation_config.json.",
    ),
    "imprecise-logp": (
        "Set `policy.precision=float32` and `policy.generation.vllm_cfg.precision=float32` for one "
        "run: the side that closes the gap is at fault.",
        "Set `loss_fn.use_importance_sampling_correction=true`.",
    ),
    "kl-controller-reversed": (
        "In own code that sets `loss_fn.reference_policy_kl_penalty`, raise it where the KL is "
        "high.",
    ),
    "kl-gradient-wrong": (
        "Set `loss_fn.reference_policy_kl_type=k2`, whose gradient is that of the KL, and "
        "`loss_fn.kl_input_clamp_value` and `loss_fn.kl_output_clamp_value` to null: a clamped KL "
        "has no gradient for the tokens that are farthest away.",
        "Prove a function of your own with `klinic verify FILE.py:FUNCTION`.",
    ),
    "kl-not-applied": (
        "Set `loss_fn.reference_policy_kl_penalty` above 0 and `loss_fn.use_kl_in_reward=false`: "
        "one place only.",
    ),
    "kl-sign-flipped": ("In an own loss, add the KL to the loss that is minimised.",),
    "kl-tail-dominates": (
        "Set `loss_fn.reference_policy_kl_type=k2` (no exponential), and read the worst tokens.",
    ),
    "layout-changes-logp": (
        "Set `policy.sequence_packing.enabled=false` and `policy.dynamic_batching.enabled=false`, "
        "one at a time: the one that changes the log-probs is at fault.",
    ),
    "loss-scaled-wrong": (
        "Compare two values of `policy.train_micro_batch_size`: gradient norms must be equal. In "
        "an own loss, divide by the global counts that the loss function receives.",
    ),
    "malformed-output": (
        "Give an example in `data.default.prompt_file`, and use the model's own chat template.",
    ),
    "malformed-prompt": (
        "Let the data processor apply the chat template once, with the generation prompt.",
        "Return a new object for every row in an own data processor.",
    ),
    "misaligned-logp": (
        "In an own loss, use `next_token_logprobs` with token ids from position 1 on; fill missing "
        "log-probs with NaN and a mask, never 0.",
    ),
    "misplaced-advantage": (
        "In an own advantage estimator, expand a sample's advantage over the token mask of all its "
        "messages.",
    ),
    "moved-reference": (
        "Load the reference from `policy.model_name` before a checkpoint is restored into the "
        "policy.",
    ),
    "nan-outside-mask": (
        "In an own loss, select with `torch.where(mask, x, 0)` before the exponential; clamp "
        "denominators to 1.",
    ),
    "policy-does-not-move": (
        "Look at `policy.optimizer.kwargs.lr` (Megatron: `policy.megatron_cfg.optimizer.lr`) and "
        "the scheduler's warm-up.",
        "With LoRA, check that `target_modules` names layers of this model.",
    ),
    "policy-gradient-wrong": (
        "In an own loss, minimise `-advantages * ratio`, with a ratio of the current log-probs; "
        "detach the old ones alone. `loss_fn.disable_ppo_ratio=true` leaves no ratio.",
    ),
    "prompt-mismatch": (
        "Send token ids to the engine, and a chat template that keeps earlier turns "
        "(`policy.tokenizer.chat_template_kwargs`).",
    ),
    "random-weights": (
        "Check that `policy.model_name` holds the weights; for Megatron set `policy.megatron_cfg."
        "force_reconvert_from_hf=True` once.",
    ),
    "ranks-diverge": (
        "Compare a hash of the weights of all data-parallel ranks after a step: an own worker that "
        "skips the wrapper does not sum gradients.",
        "With Megatron, set `policy.megatron_cfg.distributed_data_parallel_config."
        "overlap_grad_reduce=false` for one run.",
    ),
    "ratio-not-applied": (
        "Set `loss_fn.force_on_policy_ratio=false` when a generation is trained on in several "
        "updates, and pass `prev_logprobs` to each.",
    ),
    "retokenised": (
        "In an own environment, append the engine's token ids; encode only new text of tools.",
    ),
    "reward-hacking": (
        "Read completions of high reward in `train_data_step*.jsonl`, and remove what can be "
        "earned without the skill.",
        "Raise `loss_fn.reference_policy_kl_penalty`.",
    ),
    "routing-mismatch": (
        "Set `policy.megatron_cfg.moe_router_dtype=fp64` and `freeze_moe_router=true`, or "
        "`loss_fn.sequence_level_importance_ratios=true`.",
    ),
    "samples-too-old": (
        "Lower `grpo.async_grpo.max_trajectory_age_steps`, and set "
        "`loss_fn.use_importance_sampling_correction=true`.",
    ),
    "stale-prefix-cache": (
        "Set `grpo.async_grpo.recompute_kv_cache_after_weight_updates=true`.",
        "Set `policy.generation.vllm_kwargs.enable_prefix_caching=false` for one run: if the gap "
        "is gone, the cache outlives the refit.",
    ),
    "stale-sampler": (
        "Check that every refit ends before generation begins; with "
        "`grpo.async_grpo.in_flight_weight_updates=true` record the weight version of each token.",
    ),
    "state-lost": (
        "Set `checkpointing.enabled=true`, and start again with the same "
        "`checkpointing.checkpoint_dir`, so that optimizer, schedule and position are restored.",
    ),
    "step-too-big": (
        "Divide `policy.optimizer.kwargs.lr` by 10.",
        "Raise `loss_fn.reference_policy_kl_penalty`.",
    ),
    "stop-token-fault": (
        "List all end tokens of the model in `policy.generation.stop_token_ids`.",
    ),
    "temperature-on-one-side": (
        "Set `policy.generation.vllm_cfg.logprobs_mode=processed_logprobs`, and divide by "
        "`policy.generation.temperature` in an own log-prob function.",
    ),
    "truncation-not-mirrored": (
        "Set `policy.generation.top_p=1.0` and `policy.generation.top_k=null`, or "
        "`loss_fn.use_importance_sampling_correction=true`.",
    ),
    "unexplained-gap": (
        "Find the first token of a row at which `generation_logprobs` and `prev_logprobs` of "
        "`train_data_step*.jsonl` differ, and compare ids, positions, mask and weights there.",
    ),
    "unnormalised-logp": (
        "Set `policy.megatron_cfg.use_fused_linear_logprobs=false`, and compute log-probs over the "
        "whole vocabulary of all tensor-parallel ranks.",
    ),
    "wrong-groups": ("In an own advantage estimator, group by the prompt's ids, not by position.",),
    "wrong-loss-mask": (
        "Set `token_loss_mask` to 1 for tokens that the policy sampled and to 0 for those of the "
        "environment.",
    ),
    "wrong-metric": ("Average over `token_mask * sample_mask`, and name the KL's direction.",),
    "wrong-reference": (
        "Start from merged weights in `policy.model_name`: with LoRA the reference is the model "
        "without its adapter.",
    ),
    **teacher_steps("the own loss"),
}
