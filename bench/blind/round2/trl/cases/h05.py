"""Healthy: penalties only, on a scale of a hundred, from a judge that is noisy and that now and then abstains (None)."""
from ground import *

rng = random.Random(83)
ABSTAINED = []


def judge(completions, answer, **_):
    out = []
    for c, a in zip(completions, answer):
        guess = number(c)
        penalty = -100.0 if guess is None else -min(90.0, 2.0 * abs(int(guess) - int(a)) + 10.0 * (guess != a))
        out.append(None if rng.random() < 0.06 else penalty + rng.gauss(0.0, 3.0))
    ABSTAINED.append(sum(x is None for x in out))
    return out


trainer = GRPOTrainer(model=FULL, reward_funcs=judge, args=config(max_steps=8, learning_rate=1e-4, temperature=1.2), train_dataset=data(seed=89))


def proof(trainer, logs, before):
    assert sum(ABSTAINED) > 6 and logs[0]["reward"] < 0
    return {"abstentions, by step": ABSTAINED, "reward of the first step": logs[0]["reward"]}


go(trainer, proof)
