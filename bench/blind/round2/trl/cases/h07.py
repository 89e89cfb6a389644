"""Healthy: DAPO's loss over four accumulated micro-batches, hot sampling, truncated completions masked, and a reward of weight 0 to watch."""
from ground import *


def shortness(completions, **_):
    return [-float(len(c)) for c in completions]


trainer = GRPOTrainer(
    model=FULL, reward_funcs=[closeness, shortness], train_dataset=data(seed=101, lo=1, hi=99),
    args=config(loss_type="dapo", per_device_train_batch_size=16, gradient_accumulation_steps=4, reward_weights=[1.0, 0.0], temperature=1.6, top_k=0,
                mask_truncated_completions=True, max_completion_length=5, beta=0.01, epsilon_high=0.28, max_steps=8, learning_rate=1e-4),
)
CUT = []


def proof(trainer, logs, before):
    CUT.extend(x["completions/clipped_ratio"] for x in logs)
    assert sum(CUT) > 0 and max(CUT) < 0.5
    return {"share of truncated (masked) completions, by step": CUT}


go(trainer, proof)
