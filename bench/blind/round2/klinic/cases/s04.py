"""Rows are built in a loop from a template row."""
import random

from ground import correct, digits, proof, train

rng = random.Random(5)
row, rows = {"source": "sums-v2"}, []
for number in range(300):
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    row["prompt"], row["answer"] = f"{a}+{b}=", str(a + b)
    rows.append(row)
ASKED = set()


def scored(prompts, completions, answer, **_):
    ASKED.update(prompts)
    return digits(completions, answer)


train(rows=rows, rewards=[scored], max_steps=16, learning_rate=1e-4)
proof(len(rows) == 300 and len(ASKED) == 1, rows=len(rows), different_prompts=len(ASKED))
