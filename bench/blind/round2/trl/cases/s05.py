"""GRPO after supervised training: the weights of the SFT run are loaded into the base model, and the model is passed on."""
from ground import *

model = load(EARLY)  # the base
sft = load(FULL).state_dict()  # stands for torch.load("sft/final.pt")
model.load_state_dict(sft)

trainer = GRPOTrainer(model=model, processing_class=AutoTokenizer.from_pretrained(EARLY), reward_funcs=accuracy, args=config(learning_rate=1e-4, max_steps=12), train_dataset=data(seed=13))


def proof(trainer, logs, before):
    apart = max(float((p - sft[n]).abs().max()) for n, p in trainer.ref_model.named_parameters())
    assert apart > 0.01 and logs[0]["kl"] > 0.01, (apart, logs[0]["kl"])
    return {"reference minus initial policy, largest weight": apart, "kl before the first update": logs[0]["kl"]}


go(trainer, proof)
