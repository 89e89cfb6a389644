"""Fixes in the settings of verl (read in verl 0.9.1)."""

from collections.abc import Mapping

from klinic.doctor.advice.own_teacher import teacher_steps

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"

STEPS: Mapping[str, tuple[str, ...]] = {
    "advantage-explodes": (
        "Set `algorithm.norm_adv_by_std_in_grpo=False`: no division by a group's tiny standard "
        "deviation.",
    ),
    "broken-reward": (
        "Call the function of `reward.custom_reward_function.path` on one right and one wrong "
        "completion, with the row's `data_source`, `ground_truth` and `extra_info`.",
        "Let it run outside the main thread: time-outs by signals fail silently in verl's reward "
        "workers. Let exceptions raise instead of paying 0.",
        "Check that `reward_model.ground_truth` of the rows has the form that the function "
        "compares with.",
    ),
    "broken-sampler": (
        f"Set `{ROLLOUT}.do_sample=True` and a temperature above 0, and remove a seed from "
        f"`{ROLLOUT}.engine_kwargs` that all replicas share.",
    ),
    "cliff-rewards": ("Return partial credit from `reward.custom_reward_function.path`.",),
    "clip-range-wrong": (
        "Set `actor_rollout_ref.actor.clip_ratio=0.2`: it is a distance of the ratio from 1.",
    ),
    "context-truncated": (
        "Raise `data.max_response_length`.",
        "Use a reward manager that shapes the reward near the limit (`reward.reward_manager.name="
        "dapo`).",
    ),
    "corrupted-sync": (
        "Compare a checksum of every tensor after a sync, by name and shape: adapters, packed "
        "experts, buffers.",
        f"Set `{MODEL}.lora_rank=0` or another `{ROLLOUT}.checkpoint_engine.backend` for one run: "
        "the part that changes the gap is at fault.",
    ),
    "dropout-in-scoring": (
        f"Set the model's dropouts to 0 in `{MODEL}.override_config`, and `lora_dropout` of an "
        "adapter.",
    ),
    "entropy-term-wrong": (
        "In an own loss, subtract `entropy_coeff` times the entropy: the loss is minimised.",
        f"If the entropy rises, set `{ACTOR}.entropy_coeff=0`.",
    ),
    "equal-rewards": (
        "Call the reward function by hand on right and wrong completions: do they differ?",
        f"Raise `{ROLLOUT}.n`, or set `algorithm.filter_groups.enable=True` to sample such prompts "
        "again.",
    ),
    "gap-grows-with-position": (
        f"Set `{ROLLOUT}.engine_kwargs.vllm.disable_cascade_attn=True`.",
        f"Compare rotary scaling and `{ROLLOUT}.max_model_len` with the model's config.",
    ),
    "gradient-not-cleared": (
        "In an own actor, call `self.actor_optimizer.zero_grad()` before the micro-batches of "
        "every mini-batch and once after its step.",
    ),
    "hidden-sampling-transform": (
        f"Set `{ROLLOUT}.top_p=1` and `{ROLLOUT}.top_k=-1`.",
        f"Set `{ROLLOUT}.engine_kwargs.vllm.generation_config=vllm`: otherwise the engine takes "
        "penalties and truncation from the model's generation_config.json.",
    ),
    "imprecise-logp": (
        f"Set `+{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp32`, and the same of "
        "`actor_rollout_ref.ref`, for one run: if the finding is gone, the learner's head or "
        "log-softmax runs in bf16. verl without flash-attn returns bf16 log-probs.",
        "Correct with truncated importance weights: `algorithm.rollout_correction.rollout_is="
        "token`.",
    ),
    "kl-controller-reversed": (
        "Set `algorithm.kl_ctrl.type=fixed`, or give an own controller the sign of the built-in "
        "one.",
    ),
    "kl-gradient-wrong": (
        f"Set `{ACTOR}.kl_loss_type=k3+`: its value is k3 and its gradient that of k2. "
        "`low_var_kl` clamps, and has no gradient beyond the clamp.",
        "Prove a function of your own with `klinic verify FILE.py:FUNCTION`.",
    ),
    "kl-not-applied": (
        f"Set `{ACTOR}.use_kl_loss=True` and `{ACTOR}.kl_loss_coef` above 0; `algorithm.kl_ctrl` "
        "acts with `algorithm.use_kl_in_reward=True` only. Use one of the two.",
    ),
    "kl-sign-flipped": ("In an own policy loss, add the KL to the loss that is minimised.",),
    "kl-tail-dominates": (
        f"Set `{ACTOR}.kl_loss_type=mse` (k2: no exponential, and the gradient of the KL), and "
        "read the worst tokens.",
    ),
    "layout-changes-logp": (
        f"Set `{MODEL}.use_remove_padding=False` and `{MODEL}.use_fused_kernels=False`, one at a "
        "time: the one that changes the log-probs is at fault.",
    ),
    "loss-scaled-wrong": (
        f"Compare two values of `{ACTOR}.ppo_micro_batch_size_per_gpu`: gradient norms must be "
        f"equal. With an own `{ACTOR}.loss_agg_mode`, divide by the tokens of the whole "
        "mini-batch on all ranks.",
    ),
    "malformed-output": (
        f"Use the model's own chat template (`{MODEL}.custom_chat_template=null`) and an example "
        "in the prompt.",
    ),
    "malformed-prompt": (
        "Keep messages in the `data.prompt_key` column: verl applies the chat template itself, "
        "once.",
        "Check the rows of the parquet file: an object changed in a loop makes every prompt the "
        "last one.",
    ),
    "misaligned-logp": (
        "In an own worker, slice the log-probs of the response as `[:, -response_length - 1 : -1]` "
        "of the logits, on every side.",
    ),
    "misplaced-advantage": (
        "In an own advantage estimator, multiply by `response_mask` of all turns; scores lie at "
        "the last token and must be spread over the response.",
    ),
    "moved-reference": (
        f"Load the reference from `{MODEL}.path`, not from the resumed policy, and do not share "
        "tensors between actor and reference workers.",
    ),
    "nan-outside-mask": (
        "In an own loss, select with `torch.where(mask, x, 0)` before the exponential; clamp "
        "denominators to 1.",
    ),
    "policy-does-not-move": (
        f"Set `{ACTOR}.fsdp_config.model_dtype=fp32` and look at `{ACTOR}.optim.lr` and "
        f"`{ACTOR}.optim.lr_warmup_steps`.",
        f"With `{MODEL}.lora_rank` above 0, check that `{MODEL}.target_modules` names layers of "
        "this model.",
    ),
    "policy-gradient-wrong": (
        "In an own policy loss, minimise `-advantages * ratio`, with a ratio of the current "
        "log-probs; detach the old ones alone.",
    ),
    "prompt-mismatch": (
        f"Set `{ROLLOUT}.multi_turn.use_inference_chat_template` so that engine and trainer build "
        f"the same prompt, and `{ROLLOUT}.multi_turn.tokenization_sanity_check_mode=strict`.",
    ),
    "random-weights": (
        f"Check that `{MODEL}.path` holds the weights, and that a checkpoint was converted with "
        "all its shards.",
    ),
    "ranks-diverge": (
        f"Set `{ACTOR}.strategy=fsdp2` for one run: if the processes then agree, an own worker "
        "calls the module below its wrapper, or skips the sum of the gradients.",
    ),
    "ratio-not-applied": (
        f"Set `{ACTOR}.ppo_epochs=1` and `{ACTOR}.ppo_mini_batch_size` to the train batch, or pass "
        "`old_log_prob` of the batch to the loss in every mini-batch.",
    ),
    "retokenised": (
        "In an own agent loop, append the engine's token ids; encode only new text of tools.",
        f"Set `{ROLLOUT}.multi_turn.tokenization_sanity_check_mode=strict`.",
    ),
    "reward-hacking": (
        "Read completions of high reward in `trainer.rollout_data_dir`, and remove what can be "
        "earned without the skill.",
        f"Set `{ACTOR}.use_kl_loss=True`.",
    ),
    "routing-mismatch": (f"Set `{ROLLOUT}.enable_rollout_routing_replay=True`.",),
    "samples-too-old": (
        "Lower the staleness threshold of the asynchronous trainer, and set "
        "`algorithm.rollout_correction.rollout_is=token`.",
    ),
    "stale-prefix-cache": (
        f"Set `{ROLLOUT}.free_cache_engine=True`, or `{ROLLOUT}.enable_prefix_caching=False` for "
        "one run: if the gap is gone, reset the cache after every sync.",
    ),
    "stale-sampler": (
        f"Set `{ROLLOUT}.free_cache_engine=True`: some versions skip the sync without it.",
        f"With LoRA, merge before the sync, or push the adapter under a new name; compare a run "
        f"with `{MODEL}.lora_rank=0`.",
    ),
    "state-lost": (
        "Set `trainer.resume_mode=auto`, and put `model`, `optimizer` and `extra` into both "
        f"`{ACTOR}.checkpoint.save_contents` and `{ACTOR}.checkpoint.load_contents`.",
    ),
    "step-too-big": (
        f"Divide `{ACTOR}.optim.lr` by 10.",
        f"Set `{ACTOR}.entropy_coeff=0`.",
        f"Raise `{ACTOR}.kl_loss_coef`.",
    ),
    "stop-token-fault": (
        "Give the tokenizer all end tokens of the model, and an `eos_token_id` that is not the "
        "padding; do not set `ignore_eos`.",
    ),
    "temperature-on-one-side": (
        f"Set `{ROLLOUT}.logprobs_mode=processed_logprobs`, and divide by the same "
        f"`{ROLLOUT}.temperature` in an own log-prob function.",
    ),
    "truncation-not-mirrored": (
        f"Set `{ROLLOUT}.top_p=1` and `{ROLLOUT}.top_k=-1`, or correct with "
        "`algorithm.rollout_correction.rollout_is=token`.",
    ),
    "unexplained-gap": (
        "Find the first token of a row at which `rollout_log_probs` and `old_log_probs` differ, "
        "and compare ids, positions, mask and weights there.",
    ),
    "unnormalised-logp": (
        f"Set `{MODEL}.use_fused_kernels=False`: fused kernels have counted padded vocabulary "
        "columns.",
    ),
    "wrong-groups": (
        "Give every prompt its own `uid`, and all of its responses the same; an own advantage "
        "estimator must group by it.",
    ),
    "wrong-loss-mask": (
        "In an own agent loop, set `response_mask` to 1 for sampled tokens and to 0 for those of "
        "tools and templates.",
    ),
    "wrong-metric": ("Average over `response_mask`, in the direction KL(policy || reference).",),
    "wrong-reference": (
        f"With `{MODEL}.lora_adapter_path` or an SFT adapter, merge it into `{MODEL}.path`: the "
        "reference is the model without its adapter.",
    ),
    **teacher_steps("the own worker"),
}
