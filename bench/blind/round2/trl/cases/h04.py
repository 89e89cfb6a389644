"""Healthy: the reference follows the policy (TR-DPO's soft update), every three steps, on purpose."""
from ground import *

trainer = GRPOTrainer(
    model=FULL, reward_funcs=[accuracy, closeness], train_dataset=data(seed=79),
    args=config(sync_ref_model=True, ref_model_sync_steps=3, ref_model_mixup_alpha=0.6, beta=0.1, max_steps=8, learning_rate=2e-4, temperature=1.1),
)
start = {n: p.detach().clone() for n, p in trainer.ref_model.named_parameters()}


def proof(trainer, logs, before):
    change = max(float((p - start[n]).abs().max()) for n, p in trainer.ref_model.named_parameters())
    assert change > 1e-4
    return {"largest change of a weight of the reference": change}


go(trainer, proof)
