from ground import *

trainer = GRPOTrainer(
    FULL, reward_funcs=[accuracy], train_dataset=data(lo=10, hi=70),
    args=config(max_steps=12, max_completion_length=3, mask_truncated_completions=True, loss_type="dr_grpo", learning_rate=3e-5),
)


def proof(trainer, logs, before):
    cut = [x["completions/clipped_ratio"] for x in logs]
    assert 0.05 < sum(cut) / len(cut) < 0.8, cut
    return {"clipped": cut}


go(trainer, proof)
