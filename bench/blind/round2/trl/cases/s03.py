"""LoRA, with embeddings and norms trained too, as in LongLoRA."""
from ground import *
from peft import LoraConfig, get_peft_model

model = get_peft_model(load(EARLY), LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"))
for name, p in model.named_parameters():
    if "norm" in name or "embed" in name:
        p.requires_grad_(True)

trainer = GRPOTrainer(model=model, reward_funcs=[closeness, accuracy], args=config(learning_rate=1e-3, max_steps=20, beta=0.05), train_dataset=data(n=48, seed=8))
probe = torch.tensor([trainer.processing_class(p)["input_ids"] for p in ("12+34=46", "25+51=76", "70+11=81")])


def reference():
    from trl.trainer.utils import use_adapter

    with torch.no_grad(), use_adapter(trainer.model, adapter_name="ref" if "ref" in trainer.model.peft_config else None):
        return trainer._get_per_token_logps_and_entropies(trainer.model, probe, torch.ones_like(probe), 2)[0]


start = reference()


def proof(trainer, logs, before):
    change = float((reference() - start).abs().max())
    assert change > 0.1, change
    return {"change of a log-prob of the reference, nats": change}


go(trainer, proof)
