"""verl #7270: HFRollout ignores rollout.repetition_penalty and takes the checkpoint's value.

https://github.com/verl-project/verl/issues/7270

Reported
    Rollouts of Qwen2.5-Instruct are drawn with repetition_penalty 1.05 to 1.1 while the config says
    1.0 and the training forward applies none, silently a mismatch of the two. The same
    reporter measured it for NeMo-RL #3497: 14.1% of tokens have a ratio of exactly 1, 58.8% are off
    by over 1%, 37.7% by over 10%, the geometric mean of the ratios is 0.895.
Found
    HFRollout builds its GenerationConfig of top_p, top_k and temperature alone, and transformers
    fills fields that are not set from the model's generation_config.json.
Rebuilt
    The checkpoint's generation_config.json says repetition_penalty 1.1. The trainer generates by
    transformers with a config of verl's fields alone, so that it is filled in. GRPO as in verl's
    recipes: token-mean loss, kl_loss_coef 0.001 with low_var_kl.
Seen here, seed 0
    TRL logs nothing unusual: kl from 0 to 0.03, grad_norm 2 to 4, reward 0.4 to 0.8. By the
    sampler's own log-probs, 44% of the tokens have a ratio of 1 (to 1e-4), 33% are off by over 1%,
    14% by over 10%; the geometric mean is 0.988.
"""

from pathlib import Path

from bench.reported_bugs import ground

PENALTY = 1.1
FIELDS = ("do_sample", "top_p", "top_k", "temperature", "max_new_tokens")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def train(folder: Path, seed: int) -> None:
    """Train on completions that were drawn with the penalty of the checkpoint."""
    from transformers import GenerationConfig
    from trl import GRPOTrainer

    path = ground.start(folder)
    of_checkpoint = GenerationConfig.from_pretrained(path)
    of_checkpoint.repetition_penalty = PENALTY
    of_checkpoint.save_pretrained(path)
    trainer = GRPOTrainer(
        str(path),
        reward_funcs=ground.right,
        args=ground.config(
            folder,
            seed,
            beta=0.001,
            use_bias_correction_kl=False,
            loss_type="bnpo",
            learning_rate=3e-5,
            max_steps=20,
        ),
        train_dataset=ground.dataset(ground.questions()),
    )
    set_here = {name: trainer.generation_kwargs[name] for name in (*FIELDS, *TOKENS)}
    trainer.generation_kwargs = {**set_here, "num_beams": 1, "num_return_sequences": 1}
    trainer.generation_config = GenerationConfig(**trainer.generation_kwargs)
    ground.run(trainer, folder)
