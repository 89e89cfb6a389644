from own1 import *


class Run(Packed):
    STEPS, LR, T, BETA, WARM = 12, 2e-3, 1.2, 0.01, 38
    seed = 39
    say = {"group_size": "leave out"}
    drawn = []

    def sizes(self):
        sizes = [random.randint(3, 10) for _ in range(self.P)]
        self.drawn.append(sizes)
        return sizes

    def reward(self, prompt, completion):
        want = [(d + 1) % 10 for d in prompt[:-1]] + [self.EOS]
        wrong = sum(a != b for a, b in zip(completion, want)) + abs(len(want) - len(completion))
        return -2.5 * wrong

    def prove(self):
        rewards = [h["reward"] for h in self.history]
        assert sum(rewards[-4:]) > sum(rewards[:4]) and max(map(max, self.drawn)) > min(map(min, self.drawn)), rewards
        return {"sizes_of_groups": self.drawn}


Run().main()
