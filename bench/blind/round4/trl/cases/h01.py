from ground import *

trainer = GRPOTrainer(
    FULL, reward_funcs=[accuracy], train_dataset=data(),
    args=config(max_steps=12, loss_type="dapo", num_iterations=2, per_device_train_batch_size=32, gradient_accumulation_steps=2, epsilon_high=0.28, beta=0.0, learning_rate=3e-5),
)


def proof(trainer, logs, before):
    assert trainer.num_iterations == 2 and moved(trainer, before) > 1e-5 and trainer.ref_model is None
    return {"moved": moved(trainer, before)}


go(trainer, proof)
