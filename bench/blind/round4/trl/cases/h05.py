from ground import *

trainer = GRPOTrainer(
    FULL, reward_funcs=[accuracy], train_dataset=data(),
    args=config(max_steps=10, num_generations=2, scale_rewards="none", bf16=True, loss_type="dr_grpo", learning_rate=3e-5, beta=0.0),
)


def proof(trainer, logs, before):
    assert trainer.num_generations == 2 and trainer.args.bf16 and moved(trainer, before) > 1e-5
    return {"moved": moved(trainer, before), "equal": [x["frac_reward_zero_std"] for x in logs]}


go(trainer, proof)
