"""Only new right answers are paid, so that the policy does not repeat itself; and answers may not be too short."""
from ground import *

PAID = set()
REPAID = []


def new_and_right(prompts, completions, answer, **_):
    out, refused = [], 0
    for p, c, a in zip(prompts, completions, answer):
        right = c.strip() == a
        refused += right and (p, c.strip()) in PAID
        out.append(1.0 if right and (p, c.strip()) not in PAID else 0.1 if c.strip().isdigit() else 0.0)
    PAID.update((p, c.strip()) for p, c, a in zip(prompts, completions, answer) if c.strip() == a)
    REPAID.append(int(refused))
    return out


trainer = GRPOTrainer(
    model=FULL, reward_funcs=new_and_right, train_dataset=data(n=40, seed=43),
    args=config(max_steps=18, learning_rate=2e-4, generation_kwargs={"min_new_tokens": 3}),
)
SHORT = []


def proof(trainer, logs, before):
    shortest = min(x["completions/min_length"] for x in logs)
    assert sum(REPAID) > 40 and REPAID[0] == 0 and shortest >= 4
    return {"right answers that were refused, by step": REPAID, "shortest completion, end token included": shortest}


go(trainer, proof)
