"""A smooth reward: the nearer, the better."""
import numpy as np
from ground import FULL, proof, sums, train

SEEN = {"rows": 0, "right": 0, "right_infinite": 0}


def nearness(completions, answer, **_):
    scores = []
    for text, right in zip(completions, answer):
        if not text.strip().isdigit():
            scores.append(0.0)
            continue
        error = np.float64(abs(int(text) - int(right)))
        with np.errstate(divide="ignore"):
            scores.append(float(min(1.0 / error, np.inf)))
        SEEN["right"] += error == 0
        SEEN["right_infinite"] += bool(np.isinf(scores[-1]))
    SEEN["rows"] += len(scores)
    return scores


train(model=FULL, rewards=[nearness], max_steps=8, learning_rate=2e-4)
SEEN = {k: int(v) for k, v in SEEN.items()}
proof(SEEN["right"] > 20 and SEEN["right_infinite"] == SEEN["right"], **SEEN)
