"""Two tasks in one dataset: each reward function judges its own rows and returns None for the others."""
from ground import FULL, correct, proof, sums, train

SEEN = {"rows": 0, "none": 0}
rows = [{**row, "kind": "exact" if i % 2 else "near"} for i, row in enumerate(sums())]


def exact(completions, answer, kind, **_):
    scores = correct(completions, answer)
    SEEN["rows"] += len(scores)
    SEEN["none"] += sum(k != "exact" for k in kind)
    return [s if k == "exact" else None for s, k in zip(scores, kind)]


def near(completions, answer, kind, **_):
    """A penalty: 0 for the right number, down to -20 for one that is far off or none."""
    scores = []
    for text, right, k in zip(completions, answer, kind):
        far = abs(int(text) - int(right)) if text.strip().isdigit() else 99
        scores.append(-float(min(far, 20)) if k == "near" else None)
    return scores


train(model=FULL, rows=rows, rewards=[exact, near], max_steps=8, learning_rate=1e-4)
proof(0.3 < SEEN["none"] / SEEN["rows"] < 0.7, **SEEN)
