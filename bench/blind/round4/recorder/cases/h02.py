from ground import *


class Run(Sort):
    P, G, GENERATIONS, MINI, EPOCHS, HIGH, ADVANTAGE, LR, WARM = 12, 6, 4, 2, 2, 0.28, "group_std", 6e-4, 80
    seed = 32
    kept = []

    def reward(self, prompt, completion):
        return float(completion == sorted(prompt[:-1]) + [self.EOS])

    def keep(self, rewards):
        spread = rewards.view(-1, self.G).std(1)
        rows = [i for i in range(len(rewards)) if spread[i // self.G] > 0]
        self.kept.append(len(rows))
        return rows

    def prove(self):
        assert min(self.kept) >= 2 * self.G and min(self.kept) < self.P * self.G, self.kept
        return {"rows_kept": self.kept, "rows_of_updates": [h["rows"] for h in self.history], "largest_ratio": max(self.ratios)}


Run().main()
