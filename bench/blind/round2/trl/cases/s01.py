"""A reward that is scored in batches of similar length, as one does with a slow verifier."""
from ground import *

CALLS = []


def verify(batch):
    """Stands for the remote verifier: takes a list of (completion, answer), returns a list of scores."""
    return [0.2 * (number(c) is not None) + 0.8 * (c.strip() == a) for c, a in batch]


def verified(completions, answer, **_):
    pairs = list(zip(completions, answer))
    order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]))  # similar lengths together: less padding
    scores = []
    for start in range(0, len(order), 16):
        scores.extend(verify([pairs[i] for i in order[start : start + 16]]))
    CALLS.append(sum(abs(x - y) > 1e-6 for x, y in zip(scores, verify(pairs))))
    return scores


trainer = GRPOTrainer(model=FULL, reward_funcs=verified, args=config(temperature=1.2, learning_rate=1e-4, max_steps=8), train_dataset=data())


def proof(trainer, logs, before):
    assert sum(c > 0 for c in CALLS) >= 6
    return {"rows with the reward of another row, by step": CALLS}


go(trainer, proof)
