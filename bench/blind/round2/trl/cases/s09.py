"""Four updates on each generation; `epsilon` guards the division by the standard deviation of a group, so it is small."""
from ground import *

trainer = GRPOTrainer(model=EARLY, reward_funcs=closeness, args=config(num_iterations=4, epsilon=1e-6, max_steps=8), train_dataset=data(seed=29))


def proof(trainer, logs, before):
    clipped = [x["clip_ratio/region_mean"] for x in trainer.state.log_history if "clip_ratio/region_mean" in x]
    assert trainer.epsilon_low == 1e-6 and sum(c > 0.2 for c in clipped) >= 4, clipped
    return {"share of tokens clipped, by step": clipped}


go(trainer, proof)
