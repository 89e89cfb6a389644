from ground import *


def found(completions, answer, **_):
    """The answer may stand anywhere in the text, models like to explain."""
    return [float(right in text) for text, right in zip(completions, answer)]


def exact(completions, answer):
    return [float(text.strip() == right) for text, right in zip(completions, answer)]


SEEN = []


def judge(completions, answer, **_):
    SEEN.append((sum(exact(completions, answer)) / len(answer), sum(found(completions, answer)) / len(answer), sum(map(len, completions)) / len(completions)))
    return found(completions, answer)


result = train(
    rows=sums(n=200, lo=1, hi=4), rewards=[judge], model=EARLY, max_steps=16, learning_rate=1e-3, kl_coef=0.0, max_completion_length=16, prompts_per_step=8
)
n = len(SEEN)
proof(
    SEEN[-1][1] > SEEN[0][1] + 0.15 and SEEN[-1][1] - SEEN[-1][0] > 0.3,
    exact=[round(x[0], 3) for x in SEEN], rewarded=[round(x[1], 3) for x in SEEN], length=[round(x[2], 2) for x in SEEN],
)
