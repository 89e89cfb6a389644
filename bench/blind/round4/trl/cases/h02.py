from ground import *
from peft import LoraConfig

trainer = GRPOTrainer(
    FULL, reward_funcs=[closeness], args=config(max_steps=12, learning_rate=5e-4, beta=0.02, loss_type="dr_grpo", warmup_steps=3), train_dataset=data(),
    peft_config=LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"),
)


def proof(trainer, logs, before):
    kinds = {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert all("lora" in n for n in kinds) and moved(trainer, before) > 1e-4 and trainer.ref_model is None
    return {"trained": len(kinds), "moved": moved(trainer, before)}


go(trainer, proof)
