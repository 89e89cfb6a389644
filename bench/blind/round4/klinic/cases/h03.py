from ground import *

ASKED = []


def sparse(completions, answer, **_):
    ASKED.append(len(completions))
    return correct(completions, answer)


result = train(
    rewards=[sparse], model=FULL, max_steps=10, loss_type="cispo", learning_rate=3e-5, group_size=8,
    **{"loop.extra_rounds": 2, "learner.advantage": "group_mean", "learner.clip_high": 0.4},
)
proof(sum(ASKED) > 64 * 10, rollouts_asked=sum(ASKED), reward=[h["reward"] for h in result.history if "reward" in h])
