from ground import *

PART = str(Path(SCRATCH) / "part1")
first = GRPOTrainer(FULL, reward_funcs=[closeness], args=config(max_steps=6, learning_rate=2e-4, beta=0.1, seed=5), train_dataset=data(seed=8))
first.train()
first.save_model(PART)

trainer = GRPOTrainer(
    PART, reward_funcs=[closeness], args=config(max_steps=8, beta=0.1, learning_rate=5e-5), train_dataset=data(), processing_class=AutoTokenizer.from_pretrained(FULL)
)


def proof(trainer, logs, before):
    far = max(float((p - q).abs().max()) for p, q in zip(trainer.ref_model.parameters(), load(FULL).parameters()))
    at = max(float((p - before[n]).abs().max()) for n, p in trainer.ref_model.named_parameters())
    assert far > 5e-4 and at == 0.0, (far, at)
    return {"reference_away_from_the_start_of_part_one": far, "reference_away_from_the_resumed_policy": at}


go(trainer, proof)
