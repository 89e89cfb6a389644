"""Healthy: an adapter from supervised training is trained on; the reference is a copy of it, not the base. LoRA's learning rate is high."""
from ground import *
from peft import LoraConfig, get_peft_model

tokenizer = AutoTokenizer.from_pretrained(FULL)
torch.manual_seed(2)
model = get_peft_model(load(FULL), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"))
table = rows(n=192, seed=61)  # the supervised stage: here it teaches to begin the answer with a space
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for i in range(24):
    some = table[i * 8 : i * 8 + 8]
    texts = [tokenizer(r["prompt"] + " " + r["answer"])["input_ids"] + [tokenizer.eos_token_id] for r in some]
    width = max(map(len, texts))
    ids = torch.tensor([t + [0] * (width - len(t)) for t in texts])
    labels = torch.tensor([[-100] * len(r["prompt"]) + t[len(r["prompt"]) :] + [-100] * (width - len(t)) for r, t in zip(some, texts)])
    model(input_ids=ids, labels=labels).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

trainer = GRPOTrainer(model=model, processing_class=tokenizer, reward_funcs=[accuracy, closeness], args=config(learning_rate=1e-3, max_steps=10), train_dataset=data(seed=67))


def proof(trainer, logs, before):
    b = max(float(v.abs().max()) for n, v in before.items() if "lora_B.default" in n)
    assert "ref" in trainer.model.peft_config and b > 0.01 and abs(logs[0]["kl"]) < 1e-5 and logs[-1]["kl"] > 0
    return {"largest weight of the adapter at the start": b, "kl before the first update": logs[0]["kl"]}


go(trainer, proof)
