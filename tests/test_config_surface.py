"""Every knob a recipe has, by name: a new one is seen in review."""

from klinic.recipe.keys import all_fields

BUDGET = 91

KNOBS = [
    "seed",
    "threads",
    "model.name",
    "model.dtype",
    "model.trust_remote_code",
    "model.lora_rank",
    "model.lora_alpha",
    "model.gradient_checkpointing",
    "model.compile",
    "data.task",
    "data.skill",
    "data.path",
    "data.map",
    "rewards",
    "rewards.function",
    "rewards.weight",
    "rewards.timeout",
    "rewards.concurrency",
    "rewards.retries",
    "rewards.levels",
    "eval.path",
    "eval.rewards",
    "retention.path",
    "retention.rewards",
    "kl.coef",
    "kl.estimator",
    "kl.controller",
    "kl.target",
    "kl.max_coef",
    "kl.warmup_steps",
    "kl.rollout_limit",
    "kl.monitor_every",
    "reference.path",
    "reference.ema",
    "reference.reset_every",
    "reference.on_plateau",
    "reference.reset_optimizer",
    "sampling.temperature",
    "sampling.top_p",
    "sampling.top_k",
    "sampling.min_p",
    "sampling.max_new_tokens",
    "sampling.reply",
    "sampler.type",
    "sampler.server",
    "cluster.samplers",
    "cluster.reward_workers",
    "cluster.max_staleness",
    "cluster.address",
    "loop.max_steps",
    "loop.prompts_per_step",
    "loop.group_size",
    "loop.extra_rounds",
    "loop.eval_every",
    "loop.eval_prompts",
    "loop.checkpoint_every",
    "loop.keep_checkpoints",
    "loop.show_completions_every",
    "learner.loss",
    "learner.advantage",
    "learner.clip_low",
    "learner.clip_high",
    "learner.importance_sampling",
    "learner.importance_sampling_cap",
    "learner.learning_rate",
    "learner.schedule",
    "learner.warmup_steps",
    "learner.reward_warmup_steps",
    "learner.weight_decay",
    "learner.max_grad_norm",
    "learner.updates_per_batch",
    "learner.micro_batch_size",
    "learner.shards",
    "learner.mask_truncated",
    "learner.overlong_buffer",
    "recovery.kl_limit",
    "recovery.update_kl_limit",
    "recovery.grad_norm_limit",
    "recovery.reward_drop",
    "recovery.lr_factor",
    "recovery.lr_steps",
    "recovery.max_consecutive",
    "warm_start.steps",
    "warm_start.batch_size",
    "warm_start.learning_rate",
    "warm_start.path",
    "output.dir",
    "output.trackers",
    "output.project",
    "output.records_every",
    "output.doctor",
]


def test_every_knob_is_listed_here():
    assert list(all_fields()) == KNOBS


def test_the_surface_stays_within_its_budget():
    assert len(KNOBS) <= BUDGET


def test_every_knob_is_described_in_a_sentence():
    for key, field in all_fields().items():
        assert field.description, key
        assert field.description.endswith("."), key
