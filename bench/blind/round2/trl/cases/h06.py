"""Healthy: gradients are clipped to 0.01, which AdamW does not mind; the warm-up begins at 0 and the cosine ends near it."""
from ground import *

trainer = GRPOTrainer(
    model=FULL, reward_funcs=[accuracy, closeness], train_dataset=data(seed=97),
    args=config(max_grad_norm=0.01, warmup_steps=4, lr_scheduler_type="cosine", adam_beta2=0.95, max_steps=9, learning_rate=3e-4, temperature=1.1),
)


def proof(trainer, logs, before):
    clipped = sum(x["grad_norm"] > 0.01 for x in logs)
    assert logs[0]["learning_rate"] == 0.0 and clipped >= 7 and moved(trainer, before) > 1e-4
    return {"steps with a clipped gradient": clipped, "largest change of a weight": moved(trainer, before)}


go(trainer, proof)
