"""An optimizer of one's own, with weight decay for matrices only."""
from ground import *

model = load(EARLY)
decay = [p for p in model.parameters() if p.ndim >= 2]
rest = [p for p in model.parameters() if p.ndim < 2]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], lr=3e-4, betas=(0.9, 0.99))

trainer = GRPOTrainer(model=EARLY, reward_funcs=[accuracy, closeness], args=config(learning_rate=3e-4, beta=0.02, max_steps=8), train_dataset=data(seed=19), optimizers=(optimizer, None))


def proof(trainer, logs, before):
    assert moved(trainer, before) == 0.0 and min(x["grad_norm"] for x in logs) > 0
    return {"largest change of a weight": moved(trainer, before), "grad_norm": logs[-1]["grad_norm"]}


go(trainer, proof)
