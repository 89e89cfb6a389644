from ground import *

result = train(
    rewards=[correct], model=FULL, max_steps=12, group_size=2, prompts_per_step=24, learning_rate=5e-4, loss_type="dr_grpo",
    **{"learner.advantage": "leave_one_out", "model.lora_rank": 4, "model.lora_alpha": 8, "model.dtype": "bf16"},
)
files = [p.name for p in result.folder.rglob("adapter_model*")]
proof(bool(files), adapters=files, reward=[h["reward"] for h in result.history if "reward" in h])
