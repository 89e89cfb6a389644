from ground import *

SEEN = []


def matches(completions, answer, **_):
    SEEN.append(sum(text.strip() == str(right) for text, right in zip(completions, answer)) / len(answer))
    return [1.0 if text.strip() == right else 0.0 for text, right in zip(completions, answer)]


rows = [{"prompt": row["prompt"], "answer": int(row["answer"])} for row in sums()]
result = train(rows=rows, rewards=[matches], model=FULL, max_steps=10, learning_rate=5e-5)
reward = [h["reward"] for h in result.history if "reward" in h]
proof(max(reward) == 0.0 and min(SEEN) > 0.2, reward=reward, share_right=SEEN)
