"""An adaptive KL coefficient (Ziegler et al.), as a callback."""
from ground import *

BETAS = []


class AdaptiveKL(TrainerCallback):
    def __init__(self, target, gain=0.6):
        self.target, self.gain = target, gain

    def on_log(self, args, state, control, logs=None, **kw):
        if logs and "kl" in logs:
            error = min(max(logs["kl"] / self.target - 1.0, -0.5), 0.5)
            trainer.beta *= 1.0 - self.gain * error
            BETAS.append((logs["kl"], trainer.beta))


trainer = GRPOTrainer(model=EARLY, reward_funcs=[accuracy, closeness], args=config(max_steps=12, learning_rate=5e-4, beta=0.05), train_dataset=data(seed=31), callbacks=[AdaptiveKL(target=0.01)])


def proof(trainer, logs, before):
    falls = sum(kl > 0.01 and later < earlier for (_, earlier), (kl, later) in zip(BETAS, BETAS[1:]))
    assert falls >= 3, BETAS
    return {"(kl, beta) by step": BETAS}


go(trainer, proof)
