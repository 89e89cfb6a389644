from ground import *

args = config(max_steps=10, learning_rate=1e-4, beta=0.01, loss_type="bnpo")
model = load(FULL)
decay = [p for n, p in model.named_parameters() if "norm" not in n]
rest = [p for n, p in model.named_parameters() if "norm" in n]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], lr=args.learning_rate)

trainer = GRPOTrainer(FULL, reward_funcs=[closeness, accuracy], args=args, train_dataset=data(), optimizers=(optimizer, None))


def proof(trainer, logs, before):
    far = moved(trainer, before)
    grads = [x["grad_norm"] for x in logs]
    assert far == 0.0 and max(grads) > 1e-3, (far, grads)
    return {"weights_moved": far, "grad_norm": grads}


go(trainer, proof)
