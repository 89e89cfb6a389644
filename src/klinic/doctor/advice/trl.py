"""Fixes in the settings of TRL's GRPOConfig and GRPOTrainer (read in TRL 1.16)."""

from collections.abc import Mapping

from klinic.doctor.advice.own_teacher import teacher_steps

STEPS: Mapping[str, tuple[str, ...]] = {
    "advantage-explodes": (
        'Set `scale_rewards="none"` (or "batch") in GRPOConfig: no division by a group\'s tiny '
        "standard deviation.",
        "If you compute advantages yourself, add a floor of about 1e-4 to the standard deviation.",
    ),
    "broken-reward": (
        "Call each function of `reward_funcs` on one completion that you know to be right and one "
        "that is wrong, with the dataset's own columns as keywords.",
        "Return one finite float for each completion, in their order; `None` if a function does "
        "not apply. Let exceptions and time-outs raise instead of paying 0.",
        "Read the columns that TRL passes by name (`answer`, `solution`), not a list or counter of "
        "your own: TRL shuffles and repeats prompts.",
    ),
    "broken-sampler": (
        "With `use_vllm`, remove a fixed `seed` from `generation_kwargs`: every request needs its "
        "own.",
        "Set `do_sample=True` and a temperature above 0.",
    ),
    "cliff-rewards": (
        "Add a reward function that pays for partial success, weighed by `reward_weights`.",
        "Make the penalty for malformed output smaller.",
    ),
    "clip-range-wrong": (
        "Set `epsilon=0.2` (and `epsilon_high=0.28`): it is a distance of the ratio from 1.",
    ),
    "context-truncated": (
        "Raise `max_completion_length` (and `vllm_max_model_length`).",
        "Set `mask_truncated_completions=True`, so that cut completions are not trained on.",
    ),
    "corrupted-sync": (
        "With an own engine, compare a checksum of every tensor on both sides after a sync, by "
        "name and shape.",
        "With PEFT, merge the adapter with its scale before the weights are sent.",
    ),
    "dropout-in-scoring": (
        "Set `disable_dropout=True` in GRPOConfig and `lora_dropout=0.0` in LoraConfig.",
        "Do not call `model.train()` in an own generation or scoring function.",
    ),
    "entropy-term-wrong": (
        "In an overridden `_compute_loss`, subtract the bonus: the loss is minimised.",
        "If the entropy rises, set `entropy_coef=0.0` in GRPOConfig, or a tenth of it; explore by "
        "`temperature`.",
    ),
    "equal-rewards": (
        "Call the reward functions by hand on right and wrong completions: do they differ?",
        "Raise `num_generations` or `temperature`, or choose prompts that are solved sometimes.",
        "Add a reward with partial credit.",
    ),
    "gap-grows-with-position": (
        "Give the engine the same rotary scaling and maximum length as the model "
        "(`vllm_max_model_length`, `model_init_kwargs`).",
        "Store the engine's key-value cache in the model's dtype (`kv_cache_dtype='auto'`).",
    ),
    "gradient-not-cleared": (
        "In an own `training_step` or callback, do not replace or skip the trainer's call of "
        "`model.zero_grad()` after an update.",
        "Pass the optimizer by `optimizers=`, so that the trainer clears the one that it steps.",
    ),
    "hidden-sampling-transform": (
        "Look into the model's generation_config.json and `generation_kwargs`: remove `do_sample="
        "False`, `top_k`, `top_p`, `min_p` and `repetition_penalty`.",
        "Set them in GRPOConfig instead (`top_p=1.0`, `top_k=0`, `min_p=None`, "
        "`repetition_penalty=1.0`); TRL passes these on.",
        "With `use_vllm`, start the engine with `generation_config='vllm'`.",
    ),
    "imprecise-logp": (
        "Set `cast_lm_head_to_fp32=True`, and the same dtype for trainer and engine.",
        "Keep `vllm_importance_sampling_correction=True` (truncated weights).",
    ),
    "kl-controller-reversed": (
        "In the callback that sets `trainer.beta`, raise it where the logged `kl` is above its "
        "target.",
    ),
    "kl-gradient-wrong": (
        "Set `use_bias_correction_kl=True` in GRPOConfig; TRL's k3 without it has another gradient "
        "off policy.",
        "In an own loss: `klinic verify module:function` shows its gradient; "
        '`klinic.attach(..., kl="unbiased")` replaces the term.',
    ),
    "kl-not-applied": (
        "Set `beta` above 0 in GRPOConfig.",
        "In an overridden `_compute_loss`, add `self.beta * per_token_kl` to the loss before the "
        "mean, not under `torch.no_grad()` and not `.detach()`ed.",
    ),
    "kl-sign-flipped": (
        "In an overridden `_compute_loss`, add `+ self.beta * per_token_kl`: the loss is "
        "minimised. Subtract a KL only from a reward.",
    ),
    "kl-tail-dominates": (
        '`klinic.attach(..., kl="unbiased")` replaces k3 by an estimator with linear tails.',
        "Look at the tokens with the largest gaps: often end tokens and format markers.",
    ),
    "layout-changes-logp": (
        'Pad on the left (`tokenizer.padding_side = "left"`) and pass the attention mask to every '
        "`generate` and forward call.",
        "Set `pad_token` to a token of its own, not to `eos_token`.",
        'Try `attn_implementation="sdpa"` in `model_init_kwargs`.',
    ),
    "loss-scaled-wrong": (
        "In an overridden `_compute_loss`, divide by `self.current_gradient_accumulation_steps` "
        "for `loss_type='grpo'`, and by `num_items_in_batch` for 'dapo'.",
        "Do not return a sum over micro-batches: Transformers adds their gradients.",
    ),
    "malformed-output": (
        "Use conversational prompts, so that TRL applies the model's chat template.",
        "Show the format in the prompt, or train some supervised steps first (SFTTrainer).",
    ),
    "malformed-prompt": (
        "Pass messages in the `prompt` column, or text to which the template was applied once.",
        "Make every row of the dataset an object of its own: one dict changed in a loop is one "
        "prompt.",
    ),
    "misaligned-logp": (
        "In an own scoring function, `logits[:, :-1]` predicts `ids[:, 1:]`: drop the last logit "
        "and the first id before the gather.",
        "Compare with `trainer._get_per_token_logps_and_entropies` on one batch: equal to 1e-5.",
    ),
    "misplaced-advantage": (
        "In an overridden `_generate_and_score_completions` or `_compute_loss`, expand advantages "
        "by `advantages.unsqueeze(1)` over all columns of the completion and let the mask select.",
    ),
    "moved-reference": (
        "Do not assign `trainer.ref_model = trainer.model`; pass no reference, TRL makes a copy.",
        "Set `sync_ref_model=False`, or state a moving reference on purpose.",
        "With PEFT, do not merge or rename the adapter while the reference is the base without it.",
    ),
    "nan-outside-mask": (
        "In an overridden `_compute_loss`, replace `x * mask` by `torch.where(mask, x, 0)` before "
        "`exp`, and clamp `mask.sum()` to at least 1.",
        "Set `attn_implementation='sdpa'` if padding rows give NaN.",
    ),
    "policy-does-not-move": (
        "Load the model in fp32 (`model_init_kwargs={'dtype': 'float32'}`) with `bf16=True`: bf16 "
        "weights swallow small updates.",
        "Check `learning_rate`, `warmup_ratio` and `max_grad_norm`.",
        "Make the optimizer from `trainer.model`, and look that its parameters require gradients.",
    ),
    "policy-gradient-wrong": (
        "In an overridden `_compute_loss`, the policy term is `-torch.min(ratio * advantage, "
        "clipped * advantage)` with `ratio = torch.exp(logp - old)`: not detached, and negative.",
        "Compare its gradient with that of an unmodified GRPOTrainer on one batch.",
    ),
    "prompt-mismatch": (
        "Give TRL the messages themselves; do not apply the chat template twice.",
        "Pass `attention_mask` in every own call of `generate`.",
        "With `vllm_mode='server'`, start `trl vllm-serve` with the same model and tokenizer.",
    ),
    "random-weights": (
        "Pass a checkpoint with weights as `model`, not a model built by `from_config`.",
        "With PEFT, load the adapter that was trained, from the right folder.",
    ),
    "ranks-diverge": (
        "Start by `accelerate launch` or `torchrun`, and call the wrapped `model` in "
        "`_compute_loss`, not `self.accelerator.unwrap_model(model)`: only the wrapper sums "
        "gradients over the processes.",
    ),
    "ratio-not-applied": (
        "In an overridden `_compute_loss`, compare with `inputs['old_per_token_logps']`; with "
        "`logp.detach()` in its place the ratio is 1 and nothing is clipped.",
        "With `num_iterations=1` and `steps_per_generation` at most "
        "`gradient_accumulation_steps`, both are the same.",
    ),
    "retokenised": (
        "In a `rollout_func` or own tool loop, return the token ids of the engine; do not encode "
        "the decoded text again.",
    ),
    "reward-hacking": (
        "Set `log_completions=True` and read the completions of highest reward.",
        "Raise `beta`, and lower the weight of rewards that can be earned without the skill "
        "(`reward_weights`).",
    ),
    "routing-mismatch": (
        "Set `importance_sampling_level='sequence'` (GSPO).",
        "Keep `vllm_importance_sampling_correction=True`.",
    ),
    "samples-too-old": (
        "Lower `steps_per_generation` and `num_iterations`.",
        "Keep `vllm_importance_sampling_correction=True`.",
    ),
    "stale-prefix-cache": (
        "Call `llm.reset_prefix_cache()` after every weight update of an own engine (TRL's own "
        "vLLM path does).",
    ),
    "stale-sampler": (
        "Generate with `trainer.model` itself, not with a copy made before training.",
        "With an own vLLM engine, send the weights before each generation; with PEFT, merge the "
        "adapter first.",
        "With `vllm_enable_sleep_mode=True`, send the weights after the wake-up.",
    ),
    "state-lost": (
        "Resume by `trainer.train(resume_from_checkpoint=True)`, not by passing the checkpoint as "
        "`model`: the latter starts a new optimizer and schedule.",
        "Set `save_only_model=False`, and save a coefficient or controller of your own beside the "
        "checkpoint.",
    ),
    "step-too-big": (
        "Lower `learning_rate` by a factor of 10 and set `max_grad_norm=0.2`.",
        "Raise `beta`.",
        "Remove or lower `entropy_coef`.",
    ),
    "stop-token-fault": (
        "Set `tokenizer.pad_token` to a token of its own: with `pad_token = eos_token`, a mask "
        "`ids != pad` hides the end token.",
        "Build the mask up to and including the first end token, and list every end token in "
        "`generation_config.eos_token_id`.",
    ),
    "temperature-on-one-side": (
        "Set `temperature` in GRPOConfig only, not in `generation_kwargs` or generation_config: "
        "TRL divides the logits of the loss by `GRPOConfig.temperature`.",
        "In an own scoring function, divide the logits (not the log-probs) by `self.temperature`, "
        "for the reference too.",
    ),
    "truncation-not-mirrored": (
        "Set `top_p=1.0`, `top_k=0` and `min_p=None` in GRPOConfig, or a milder truncation.",
        "Keep `vllm_importance_sampling_correction=True`.",
    ),
    "unexplained-gap": (
        "Find the first token of a row at which sampler and trainer differ, and compare its inputs "
        "on both sides: ids, attention mask, position ids, weights, temperature, dtype.",
        "Set `use_vllm=False` for a few steps: if the gap disappears, it is the engine's.",
    ),
    "unnormalised-logp": (
        "In an own scoring function, use `torch.log_softmax(logits.float(), -1)` over the whole "
        "vocabulary.",
        "Switch off fused kernels (`use_liger_kernel=False`) and compare.",
    ),
    "wrong-groups": (
        "Keep TRL's sampler: `num_generations` neighbouring rows belong to one prompt. An own "
        "`_get_train_sampler` must repeat each prompt in place.",
        "With `environment_factory`, let `reset()` return the same text for all rows of a prompt.",
        "Subtract the mean of all rewards of the group, not one completion's reward.",
        "Do not sort or shuffle rows between rewards and loss.",
    ),
    "wrong-loss-mask": (
        "In a tool loop, return a mask that is 0 on tool output (`env_mask` of `rollout_func`).",
        "Use `completion_mask` for policy term, KL and denominator alike.",
    ),
    "wrong-metric": ("Log a mean over `completion_mask`, not over the padded batch.",),
    "wrong-reference": (
        "Pass the start model itself as `model`; TRL loads its reference from the same name.",
        "With PEFT, start from the merged supervised model: the reference is the base without "
        "the new adapter.",
        "After a resume, check that `ref_model` was loaded from the start, not from a checkpoint.",
    ),
    **teacher_steps("the own subclass"),
}
