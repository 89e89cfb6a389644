"""Words that people look for and that have another name in klinic, with their answers.

`klinic explain WORD` prints them. Recipe keys, names of other trainers, metrics and checks are not
listed here: `lookup` takes those from their own tables.
"""

WORDS = {
    ("config", "config-file"): "The recipe, a YAML file: klinic train recipes/arithmetic.yaml, or "
    "klinic train --config recipes/arithmetic.yaml.",
    ("checkpoint", "checkpoint-path"): "klinic eval and klinic export take a run folder, one of "
    "its checkpoints (runs/NAME/checkpoints/step=000100) or a model folder; --checkpoint PATH is "
    "the same. loop.checkpoint_every sets how often one is saved.",
    ("device-mismatch", "wrong-device", "device-check"): "klinic check RECIPE --device cuda runs "
    "every part on the device, compares log-probs, KL and gradient with a copy on the CPU, and "
    "stops with the message of the operation that mixes devices. model.device sets the device of "
    "a run.",
    ("malformed-reward", "r-policy-malformed", "r-env-malformed"): "The reward of a completion "
    "that cannot be parsed, -0.3 for the graduated rewards of the built-in tasks. Set it with "
    "rewards: [{function: structure, levels: {malformed: -1.0}}]. r_policy_malformed is the "
    "chess skill `policy`, r_env_malformed its skill `environment`.",
    ("adaptive-kl-coefficient", "adaptive-kl", "adaptive-kl-ctl", "kl-ctrl"): "kl.controller "
    "adapts the coefficient to kl.target, in nats per token. `band` is the rule x 1.5 above 1.5 "
    "times the target and x 0.75 below half of it: klinic train RECIPE kl.controller=band "
    "kl.target=0.05. docs/how-to/adaptive-kl.md compares the rules.",
    ("sft", "supervised", "behaviour-cloning", "behavior-cloning", "bc"): "Supervised "
    "fine-tuning before GRPO (behaviour cloning of the examples) is the section warm_start: "
    "steps, batch_size, learning_rate and, for your own examples, path. Its result is cached.",
    ("verifier", "verifiers", "rule-based-reward"): "A verifier is a reward function that checks "
    "the answer: rewards: [FILE.py:FUNCTION], with the signature of TRL. With an exact verifier "
    "a run can do without the KL: kl=null. klinic verify FILE.py:FUNCTION tests the KL formula "
    "of any library.",
    ("single-batch", "single-batch-test", "smoke-test", "dry-run"): "klinic check RECIPE runs "
    "every part on 2 batches of at most 8 prompts with 2 completions each, and one update that is "
    "discarded. klinic train RECIPE --dry-run trains nothing and predicts memory and cost.",
    (
        "rookworld",
        "rookworld-lm",
        "rookworld-lm-124m",
        "chess-model",
    ): "model.name=jrahn/RookWorld-LM-124M is the "
    "GPT-2 of RookWorld on the hub; the task `chess` has its prompt format: recipes/chess.yaml.",
    (
        "before-after",
        "answers",
        "samples",
        "completions",
        "generations",
    ): "loop.show_completions_every "
    "prints completions with their rewards during training; klinic report RUN shows those of every "
    "recorded step, from the first to the last.",
    ("forgetting", "catastrophic-forgetting", "sft-retention", "sft-eval"): "retention: the score "
    "on skills that are not trained, divided by its value at the start. A task has its own; for "
    "your own data set the section retention.",
    (
        "importance-sampling-error",
        "verify-kl-importance-sampling",
        "0.012",
        "961.858",
    ): "klinic verify "
    "importance-sampling averages k3 and its reversed form over 100,000 tokens of an older policy, "
    "at five distances. k3 with the ratio stays near the exact KL; the reversed form is off by "
    "chi-square minus twice the KL, which grows from 0.0002 to 199 there and has no upper limit. "
    "Errors such as 0.012 against 961.858 are these two, at another distance.",
    (
        "verify-kl-direction",
        "kl-direction",
        "reversed-kl",
        "reversed-k3",
        "k3-reversed-kl",
    ): "klinic verify direction compares k3 "
    "and its reversed form with the exact KL. docs/explanation/which-kl.md explains the "
    "directions.",
    ("ablation", "sweep", "hyperparameter-search", "grid-search"): "klinic ablate RECIPE --vary "
    "kl.coef=0,0.01,0.1 --seeds 3 compares settings with intervals and recommends one.",
    ("wandb", "weights-and-biases", "tensorboard", "trackio"): "output.trackers, or --report-to "
    "wandb: docs/how-to/watch-a-run.md. Logs of other trainers: klinic diagnose PATH.",
    ("vllm",): "sampler.type=vllm starts an engine, sampler.server=URL uses one that runs: "
    "docs/how-to/scale-out.md.",
    ("fsdp", "multi-gpu", "ddp", "deepspeed"): "learner.shards=N shards the learner over N "
    "processes with FSDP2: docs/how-to/scale-out.md.",
    ("lora", "peft", "qlora"): "model.lora_rank and model.lora_alpha train an adapter: "
    "docs/how-to/lora.md. The reference is then the model with the adapter off.",
    (
        "hypotheses",
        "hypothesis",
        "invalidation-criteria",
        "priority",
        "h05",
    ): "klinic explain H01, H02, H03, H04 or H06 prints a hypothesis about an exploding KL "
    "with its priority, what speaks against it and its checks. klinic explain lists them."
    " H05 is not used.",
    (
        "reverse-kl",
        "forward-kl",
        "kl-formula",
        "schulman",
        "kl-estimator",
        "kl-estimators",
        "kl-loss-type",
    ): "KL(policy || reference) is the reverse KL, KL(reference || policy) the forward one. "
    "kl.estimator chooses the term: klinic explain k3, docs/explanation/which-kl.md; "
    "klinic verify proves the gradient of each.",
    (
        "musique",
        "train-musique",
        "musique-mini",
    ): "recipes/musique.yaml trains on MuSiQue: klinic train recipes/musique.yaml --datasets"
    ' "bdsaglam/musique-mini,answerable,train[:100]" --kl-beta 0.0 --batch-size 8 '
    "--num-generations 8 --max-steps 100.",
    (
        "ref-logp",
        "ref-logps",
        "policy-logp",
        "policy-log-probs",
        "ref-log-probs",
        "reference-log-probs",
    ): "The metrics `logp` and `logp_ref` are the mean log-probs under policy and reference;"
    " the records hold those of every token.",
    (
        "kl-mean",
        "kl/mean",
        "kl-max",
        "kl/max",
        "kl-min",
        "kl/min",
    ): "The metrics `kl_k3/mean`, `kl_k3/max` and `kl_k3/min`, over tokens; `kl_k1/...` and "
    "`kl_exact/...` are the same of other measures. docs/reference/metrics.md describes "
    "them.",
    (
        "gradient-explosion",
        "grad-norm-explosion",
        "exploding-gradient",
        "exploding-gradients",
        "kl-explodes",
        "kl-explosion",
        "blow-up",
        "collapse",
    ): "klinic diagnose RUN names the cause; docs/how-to/kl-explodes.md and "
    "docs/how-to/policy-diverges.md go through the signs. recovery.grad_norm_limit and "
    "recovery.kl_limit stop such a step. In a log the sign is gradient-explodes.",
    (
        "lora-sync",
        "adapter-sync",
        "weight-sync",
    ): "A sampler that misses the adapter or newer weights is the cause stale-sampler, a "
    "damaged sync corrupted-sync: klinic explain stale-sampler. To rule the adapter out, "
    "train all weights: model.lora_rank=null.",
    (
        "full-parameter",
        "full-fine-tuning",
        "full-finetuning",
    ): "model.lora_rank=null trains all weights; it is the default.",
    (
        "papers",
        "references",
        "literature",
        "cite",
        "citation",
    ): "docs/explanation/papers.md maps papers to functions and settings; CITATION.cff cites"
    " klinic.",
    (
        "starter",
        "one-file",
        "compute-kl-divergence",
        "compute-loss",
        "grpo-microbatch-step",
        "kl-penalty-mean",
        "quick-tests",
    ): "examples/starter.py is GRPO with a KL penalty in one file, with "
    "compute_kl_divergence, compute_loss, grpo_microbatch_step and train; python "
    "examples/starter.py runs its quick tests, then a run without and one with the KL.",
    (
        "memory",
        "oom",
        "out-of-memory",
        "cuda-out-of-memory",
    ): "klinic train RECIPE --dry-run predicts the memory. docs/how-to/out-of-memory.md "
    "lists what to change first, such as model.gradient_checkpointing and "
    "learner.micro_batch_size.",
    (
        "troubleshooting",
        "not-learning",
        "does-not-learn",
        "no-improvement",
    ): "klinic diagnose RUN names the cause. docs/how-to/training-does-not-improve.md, "
    "docs/how-to/kl-explodes.md and docs/how-to/train.md#troubleshooting go through the "
    "signs.",
    (
        "truncation",
        "truncated-without-eos",
        "eos",
        "max-length",
        "length-limit",
    ): "completions/clipped_ratio is the fraction of completions that reached "
    "sampling.max_new_tokens without an end token. Causes: context-truncated, "
    "stop-token-fault.",
    (
        "kl-dominates",
        "kl-share",
        "kl-too-strong",
    ): "kl/grad_share is the KL term's fraction of the gradient, kl_penalty its part of the "
    "loss. If it dominates, lower kl.coef: docs/how-to/choose-the-coefficient.md.",
    (
        "parameter-count",
        "num-parameters",
        "model-size",
    ): "klinic check RECIPE and klinic train RECIPE --dry-run print the number of "
    "parameters; untrained weights are the cause random-weights.",
    (
        "structure",
        "parses",
        "legality",
        "agreement",
        "graduated",
        "graduated-rewards",
        "partial-credit",
        "levels",
    ): "Graduated rewards score a completion by levels: "
    "docs/how-to/rewards.md#graduated-rewards. docs/reference/tasks.md lists those of the"
    " built-in tasks, such as structure and parses of chess.",
    (
        "conservative",
        "preset",
        "presets",
        "safe-settings",
    ): "recipes/conservative.yaml has a small learning rate, coefficient and clip range: "
    "klinic train recipes/conservative.yaml KEY=VALUE.",
    (
        "clip",
        "clip-eps",
        "clipping",
        "ppo-clip",
    ): "learner.clip_low and learner.clip_high bound the ratio; clip_range=0.2 sets both. "
    "learner.max_grad_norm clips the gradient.",
    (
        "kl-warmup",
        "kl-warmup-factor",
    ): "kl.warmup_steps raises the coefficient linearly from 0; kl_warmup_steps is the same.",
    (
        "mixed-precision",
        "amp",
        "autocast",
        "precision",
        "half-precision",
        "float16",
    ): "model.dtype=bf16 has bf16 operands and fp32 sums; fp32 is the default. "
    "model.compile=true compiles the model.",
    (
        "nan",
        "nans",
        "nan-handling",
        "nan-loss",
        "inf",
        "non-finite",
        "final-metrics",
    ): "An update with a non-finite loss or gradient is never applied; its metrics are "
    "recorded. The section recovery decides what follows: docs/how-to/recover.md. klinic "
    "diagnose RUN names the cause; in a log the sign is not-a-number.",
    (
        "prompt-format",
        "chat-template",
        "system-prompt",
    ): "A prompt is a text or a chat, and a chat passes the model's template: "
    "docs/how-to/own-data.md. Templated twice is the cause malformed-prompt.",
    (
        "moving-reference",
        "adaptive-reference",
        "reference-reset",
        "sync-ref-model",
        "ref-model-sync-steps",
        "target-network",
    ): "reference.ema, reference.reset_every and reference.on_plateau let the reference "
    "follow the policy: docs/how-to/moving-reference.md.",
    (
        "kl-cap",
        "cap-kl-during-collection",
        "kl-clip",
        "max-kl",
        "kl-threshold",
        "kl-budget",
    ): "kl.rollout_limit is a limit on the KL of a completion while it is collected, "
    "recovery.kl_limit on that of a step, recovery.update_kl_limit on the updates of a "
    "batch: docs/how-to/recover.md#kl-limits.",
    (
        "algorithm",
        "algorithms",
        "rl-algorithm",
        "ppo",
        "grpo-loss",
        "reinforce",
        "rloo",
    ): "learner.loss is grpo, dr_grpo, bnpo, dapo, gspo or cispo; "
    "learner.advantage=leave_one_out with kl.estimator=k1_reward is RLOO. There is no "
    "value model, so no PPO with a critic.",
    (
        "train.sh",
        "one-command",
    ): "klinic train RECIPE is the one command: it trains, records, tests every step and "
    "resumes after a crash by itself.",
    ("chess", "stockfish"): "recipes/chess.yaml trains on chess positions judged by Stockfish: "
    "docs/reference/tasks.md#chess. It needs klinic[chess] and stockfish.",
    (
        "gsm8k",
        "math",
        "math-dataset",
        "math-verify",
    ): "recipes/gsm8k.yaml trains on GSM8K with math-verify: "
    "docs/reference/tasks.md#word-problems.",
    (
        "tutorial",
        "course",
        "lesson",
        "introduction",
    ): "docs/tutorial/kl-and-policy-regularisation.md, 45 minutes, every command runs on a "
    "CPU. klinic demo is shorter.",
    (
        "kl-in-reward",
        "kl-in-the-reward",
        "penalised-reward",
        "penalized-reward",
        "reward-penalty",
    ): "kl.estimator=k1_reward puts the KL into the reward; the metric reward/penalized is "
    "the reward minus it. "
    "docs/tutorial/kl-and-policy-regularisation.md#kl-in-the-reward-and-in-the-loss "
    "compares both.",
    (
        "beta-table",
        "which-beta",
        "which-coefficient",
        "choose-the-coefficient",
        "coefficient",
    ): "docs/how-to/choose-the-coefficient.md, with a table of coefficients from 0 to 1; "
    "klinic ablate measures them on your task.",
    (
        "compare-checkpoints",
        "kl-between-checkpoints",
        "kl-between-models",
        "model-distance",
    ): "klinic eval ONE --reference OTHER --prompts FILE computes the exact KL between two "
    "models over the vocabulary, on your prompts.",
    ("evaluate", "evaluation"): "klinic eval --checkpoint PATH.",
    (
        "plot-kl-ablation",
        "plot",
    ): "klinic ablate --plot FOLDERS draws finished runs; klinic report RUN draws the curves"
    " of one or two runs.",
    (
        "warning-signs",
        "warnings",
        "kl-too-high",
        "kl-too-low",
    ): "Live messages about the trend of a run: drift too fast, not learning, retention "
    "dropping. docs/how-to/watch-a-run.md describes them, "
    "docs/tutorial/kl-and-policy-regularisation.md#monitoring-a-run the values to look "
    "at.",
    (
        "reference-model",
        "frozen-reference",
        "ref-policy",
        "sft-checkpoint",
        "initial-policy",
    ): "The reference is a frozen copy of the policy at the start, in eval mode and without "
    "gradients; with LoRA the model with the adapter off. reference=./sft_checkpoint "
    "names another folder. Without a KL none is loaded.",
    (
        "resume",
        "continue",
        "restart",
        "crash",
    ): "A run resumes by itself after a crash; klinic train RECIPE --resume continues it by "
    "hand, in Python klinic.train(..., resume_from_checkpoint=True): "
    "docs/how-to/train.md#resume-a-run.",
    (
        "notebook",
        "jupyter",
        "colab",
        "ipynb",
    ): "examples/first_steps.ipynb; klinic.train shows a progress bar in a notebook, and its"
    " result a table.",
    (
        "trl",
        "grpotrainer",
        "attach",
        "unsloth",
    ): "klinic.attach(trainer, FOLDER) before trainer.train() records and diagnoses a run of"
    " GRPOTrainer: docs/how-to/trl.md. klinic.train(...) takes the arguments of "
    "GRPOTrainer.",
    (
        "verl",
        "openrlhf",
        "nemo-rl",
        "prime-rl",
        "slime",
        "skyrl",
        "areal",
        "ms-swift",
        "open-instruct",
        "other-trainers",
    ): "klinic diagnose PATH reads the logs and dumps of other trainers: "
    "docs/how-to/other-trainers.md, with a page for each trainer.",
    (
        "gpu",
        "cuda",
        "accelerator",
        "mps",
    ): "model.device=cuda, or auto, which takes the first accelerator: "
    "docs/how-to/first-run-on-a-gpu.md. klinic check RECIPE --device cuda tests it first.",
    (
        "quantization",
        "4bit",
        "4-bit",
        "8bit",
        "bitsandbytes",
        "gguf",
    ): "klinic trains fp32 weights with bf16 matrix products, or an adapter on bf16 weights;"
    " no 4-bit or 8-bit base.",
    (
        "distillation",
        "distil",
        "distill",
        "on-policy-distillation",
        "knowledge-distillation",
    ): "The section teacher adds the KL to another model, with or instead of rewards: "
    "docs/how-to/distil.md, recipes/distil.yaml.",
    (
        "tools",
        "tool-use",
        "tool-calling",
        "multi-turn",
        "agent",
        "environment",
    ): "sampling.reply=FILE.py:FUNCTION answers the policy, so that a completion has several"
    " turns: docs/how-to/own-data.md#tools-and-several-turns. The skill `environment` of "
    "chess is another thing: docs/reference/tasks.md#chess.",
    (
        "reward-function",
        "reward-functions",
        "custom-reward",
        "own-reward",
        "reward-func",
    ): "rewards: [FILE.py:FUNCTION], with TRL's signature; in Python "
    "reward_funcs=[function]. docs/how-to/rewards.md.",
    (
        "own-data",
        "data-format",
        "jsonl",
        "csv",
        "parquet",
    ): "data.path takes JSONL, JSON, CSV, Parquet, a folder or a hub id: docs/how-to/own-data.md.",
    (
        "optimizer",
        "adamw",
        "adam",
        "lr-scheduler",
        "scheduler",
    ): "AdamW, with learner.learning_rate, learner.schedule, learner.warmup_steps, "
    "learner.weight_decay, learner.adam_beta1 and learner.adam_beta2.",
    (
        "early-stopping",
        "stop",
    ): "Ctrl-C stops after the step and saves; loop.max_steps is the length. "
    "output.doctor=stop ends a run whose cause is certain, the section recovery one that "
    "cannot go on; a callback of klinic.train may end it too.",
    (
        "logging",
        "log",
        "metrics",
        "logs",
    ): "One line per step, metrics.jsonl, and the trackers of output.trackers: "
    "docs/how-to/watch-a-run.md; docs/reference/metrics.md describes all metrics.",
    (
        "hub",
        "huggingface",
        "upload",
        "model-card",
    ): "klinic export RUN --to FOLDER writes a model folder with a model card, ready to "
    "upload; klinic uploads nothing itself.",
    (
        "grpo",
        "group-size",
        "group",
    ): "Group-relative policy optimisation: loop.group_size completions per prompt, with "
    "advantages within the group. learner.loss=grpo is its loss; "
    "docs/tutorial/kl-and-policy-regularisation.md explains it.",
    (
        "qwen",
        "qwen2.5",
        "qwen2.5-3b-instruct",
        "qwen2.5-7b-instruct",
    ): "recipes/qwen2.5-7b-lora.yaml "
    "(LoRA of rank 16, alpha 32), recipes/qwen2.5-7b-lora-8gpu.yaml and "
    "recipes/qwen2.5-3b-lora-24gb.yaml.",
    ("warmup", "warm-up"): "learner.warmup_steps of the learning rate, kl.warmup_steps of the "
    "coefficient, learner.reward_warmup_steps of the advantages; the section warm_start is "
    "supervised training before GRPO.",
    ("callback", "trainer-callback"): "klinic.train(..., callbacks=[...]) takes the documented "
    "subset of TrainerCallback: docs/reference/python.md.",
}
"""Answers by their words. Case, dashes and underscores are equivalent."""
