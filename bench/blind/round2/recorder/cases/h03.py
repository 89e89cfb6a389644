import random

from ground import Sort


class Case(Sort):
    LIMIT, HIGH, ADVANTAGE, P = 6, 0.28, "group_std", 10
    masked, dropped = 0, 0

    def reward(self, prompt, completion):
        return 1.0 if completion == sorted(prompt[:-1]) + [self.EOS] else -1.0

    def loss_masks(self, completions, mask):
        """Overlong rows are not trained on."""
        weights = mask.clone()
        for i, row in enumerate(completions):
            if row[-1] != self.EOS:
                weights[i] = False
                self.masked += 1
        return weights

    def keep(self, rewards):
        varied = (rewards.view(-1, self.G).std(1) > 0).repeat_interleave(self.G)
        self.dropped += int((~varied).sum())
        return [i for i in range(len(rewards)) if varied[i]]

    def split(self, rows):
        rows = list(rows)
        random.shuffle(rows)
        size = -(-len(rows) // self.MINI)
        return [rows[i : i + size] for i in range(0, len(rows), size)]

    def prove(self):
        assert self.dropped > 0
        return {"rows_masked": self.masked, "rows_dropped": self.dropped, "rows": [h["rows"] for h in self.history]}


if __name__ == "__main__":
    Case().main()
