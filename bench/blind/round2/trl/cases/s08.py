"""A linear decay of one's own, because the built-in ones do not know the length of a stream."""
from ground import *

model = load(EARLY)
train = data(n=40, seed=23)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.0)
steps_per_epoch = len(train) // 8  # 8 prompts per update
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / steps_per_epoch)

trainer = GRPOTrainer(model=model, processing_class=AutoTokenizer.from_pretrained(EARLY), reward_funcs=closeness, args=config(max_steps=10, learning_rate=6e-4), train_dataset=train, optimizers=(optimizer, scheduler))


def proof(trainer, logs, before):
    lrs = [x["learning_rate"] for x in logs]
    assert min(lrs) < -3e-4, lrs
    return {"learning rates": lrs}


go(trainer, proof, parse=None)
