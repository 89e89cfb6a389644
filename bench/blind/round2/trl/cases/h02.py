"""Healthy: GSPO, whose ratio is that of the whole completion, with the tiny clip range that belongs to it, and several updates."""
from ground import *

trainer = GRPOTrainer(
    model=FULL, reward_funcs=[accuracy, closeness], train_dataset=data(seed=71),
    args=config(importance_sampling_level="sequence", loss_type="grpo", epsilon=3e-3, epsilon_high=4e-3, num_iterations=2, steps_per_generation=2,
                per_device_train_batch_size=32, max_steps=8, learning_rate=1e-5, temperature=1.2),
)


def proof(trainer, logs, before):
    clipped = [x["clip_ratio/region_mean"] for x in trainer.state.log_history if "clip_ratio/region_mean" in x]
    assert 0 < max(clipped) and trainer.importance_sampling_level == "sequence" and "old_per_token_logps" in trainer._buffered_inputs[0]
    return {"share clipped, by step": clipped}


go(trainer, proof)
