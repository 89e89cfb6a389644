from ground import *

SFT = Path(SCRATCH) / "sft.pt"
torch.save(load(FULL).state_dict(), SFT)

model = load(EARLY)
model.load_state_dict(torch.load(SFT))
start = {n: p.detach().clone() for n, p in model.named_parameters()}

trainer = GRPOTrainer(
    model, reward_funcs=[closeness], args=config(max_steps=10, beta=0.1, learning_rate=5e-5, loss_type="dr_grpo"), train_dataset=data(),
    processing_class=AutoTokenizer.from_pretrained(EARLY),
)


def proof(trainer, logs, before):
    far = max(float((p - start[n]).abs().max()) for n, p in trainer.ref_model.named_parameters())
    assert far > 0.05 and logs[0]["kl"] > 0.1, (far, logs[0])
    return {"reference_away_from_start": far, "kl_first": logs[0]["kl"]}


go(trainer, proof)
