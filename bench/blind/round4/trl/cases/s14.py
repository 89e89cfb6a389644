from ground import *

trainer = GRPOTrainer(
    FULL, reward_funcs=[closeness], args=config(max_steps=10, learning_rate=2e-5, beta=0.02, model_init_kwargs={"dtype": "bfloat16"}), train_dataset=data(),
)


def proof(trainer, logs, before):
    same = total = 0
    for n, p in trainer.model.named_parameters():
        same += int((p.detach() == before[n]).sum())
        total += p.numel()
    kind = str(next(trainer.model.parameters()).dtype)
    assert kind == "torch.bfloat16" and same / total > 0.8 and max(x["grad_norm"] for x in logs) > 1e-3, (kind, same / total)
    return {"dtype": kind, "share_of_weights_unchanged": same / total}


go(trainer, proof)
