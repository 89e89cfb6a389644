"""Words that people look for and that have another name in klinic, with their answers.

`klinic explain WORD` prints them. Recipe keys, names of other trainers, metrics and checks are not
listed here: `lookup` takes those from their own tables.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A hypothesis about an exploding KL, with what speaks against it."""

    title: str
    priority: str
    invalidated_by: tuple[str, ...]


HYPOTHESES = {
    "H01": Hypothesis(
        title="Advantage scaling",
        priority="high: test it before H03, which it hides",
        invalidated_by=(
            "The largest advantage stays the same with learner.advantage: leave_one_out.",
            "advantage-explodes and wrong-groups are ruled out.",
        ),
    ),
    "H02": Hypothesis(
        title="Token masks",
        priority="high",
        invalidated_by=("wrong-loss-mask and stop-token-fault are ruled out.",),
    ),
    "H03": Hypothesis(
        title="KL formula",
        priority="high, after H01",
        invalidated_by=(
            "The run fails in the same way with kl.coef=0.",
            "The logged KL is positive and of a plausible size.",
            "The formula is that of other libraries: klinic verify FILE.py:FUNCTION.",
            "A corrected formula does not improve training: klinic diagnose RUN --prove.",
        ),
    ),
    "H04": Hypothesis(
        title="Context truncation",
        priority="medium",
        invalidated_by=("context-truncated is ruled out.",),
    ),
    "H06": Hypothesis(
        title="Weight synchronisation, also of LoRA adapters",
        priority="high",
        invalidated_by=(
            "stale-sampler is ruled out.",
            "The same run without an adapter (model.lora_rank=null) fails in the same way.",
        ),
    ),
}

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
    ("rookworld", "rookworld-lm", "chess-model"): "model.name=jrahn/RookWorld-LM-124M is the "
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
    ("importance-sampling-error", "verify-kl-importance-sampling", "961.858"): "klinic verify "
    "importance-sampling averages k3 and its reversed form over 100,000 tokens of an older policy, "
    "at five distances. k3 with the ratio stays near the exact KL; the reversed form is off by "
    "chi-square minus twice the KL, which grows from 0.0002 to 199 there and has no upper limit. "
    "Errors such as 0.012 against 961.858 are these two, at another distance.",
    ("verify-kl-direction", "kl-direction", "reversed-kl"): "klinic verify direction compares k3 "
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
}
"""Answers by their words. Case, dashes and underscores are equivalent."""
