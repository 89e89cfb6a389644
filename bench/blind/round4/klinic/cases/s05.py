from ground import *

rng = random.Random(4)
LOST = []


def call_judge(text, right):
    if rng.random() < 0.35:
        raise TimeoutError("judge is busy")
    return digits([text], [right])[0]


def judge(completions, answer, **_):
    scores = []
    for text, right in zip(completions, answer):
        try:
            scores.append(call_judge(text, right))
        except Exception:
            scores.append(0.0)
            LOST.append(digits([text], [right])[0])
    return scores


result = train(rewards=[judge], model=FULL, max_steps=12, learning_rate=1e-2, kl_coef=0.005, **{"learner.max_grad_norm": 10.0})
reward = [h["reward"] for h in result.history if "reward" in h]
proof(
    sum(x > 0 for x in LOST) > 30 and reward[-1] < 0.5 * reward[0],
    good_answers_scored_zero=sum(x > 0 for x in LOST), reward=reward, kl=[h.get("kl") for h in result.history if "reward" in h],
)
