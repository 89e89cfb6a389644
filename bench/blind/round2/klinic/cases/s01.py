"""A judge scores completions in buckets of equal length, to pad less."""
import ground
from ground import digits, proof, sums, train

SEEN = {"rows": 0, "wrong": 0}


def bucketed(completions, answer, **_):
    order = sorted(range(len(completions)), key=lambda i: len(completions[i]))
    scores = digits([completions[i] for i in order], [answer[i] for i in order])
    true = digits(completions, answer)
    SEEN["rows"] += len(true)
    SEEN["wrong"] += sum(a != b for a, b in zip(scores, true))
    return scores


train(rewards=[bucketed], rows=sums(lo=20), max_steps=18, learning_rate=2e-4)
proof(SEEN["wrong"] > 0.1 * SEEN["rows"], **SEEN)
