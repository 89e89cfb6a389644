"""A curriculum in the reward: near answers count at first, and less so from step to step."""
from ground import proof, sums, train


class Curriculum:
    __name__ = "curriculum"

    def __init__(self):
        self.calls, self.means = 0, []

    def __call__(self, completions, answer, **_):
        reach = max(2.0, 40.0 * 0.7**self.calls)
        self.calls += 1
        scores = []
        for text, right in zip(completions, answer):
            text = text.strip()
            near = max(0.0, 1 - abs(int(text) - int(right)) / reach) if text.isdigit() else 0.0
            scores.append(near)
        self.means.append(sum(scores) / len(scores))
        return scores


curriculum = Curriculum()


def near(completions, answer, **_):
    return curriculum(completions, answer)


train(rewards=[near], max_steps=10, learning_rate=1e-4)
proof(curriculum.calls == 10 and curriculum.means[-1] < curriculum.means[0], means=curriculum.means)
