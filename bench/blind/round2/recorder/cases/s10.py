import torch

from ground import FULL, Sums, group_advantage


class Case(Sums):
    MODEL, P = FULL, 7
    wrong = []

    def judge(self, prompts, texts, answers):
        parsed = [self.parse(p, t) for p, t in zip(prompts, texts)]
        return [float(x == a) for x, a in zip(parsed, answers)], sum(x is not None for x in parsed) / len(parsed)

    def choose(self, rewards, advantage):
        """Dynamic sampling: groups whose rewards are all equal are left out."""
        varied = rewards.view(-1, self.G).std(1) > 0
        rows = torch.arange(len(rewards))[varied.repeat_interleave(self.G)]
        total_reward = rewards[: len(rows)]
        used = group_advantage(total_reward, self.G, self.ADVANTAGE)
        self.wrong.append(float(((used - advantage[rows]).abs() > 1e-3).float().mean()))
        return rows, used

    def prove(self):
        assert sum(w > 0 for w in self.wrong) >= 4
        return {"share_of_rows_with_another_rows_reward": self.wrong, "rows": [h["rows"] for h in self.history]}


if __name__ == "__main__":
    Case().main()
