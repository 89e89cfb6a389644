import re

from ground import FULL, Sums


class Case(Sums):
    MODEL = FULL
    silent = ("entropy", "update_norm", "entropy_coef", "logp_sampler")

    def parse(self, prompt, text):
        return re.search(r"\d+", prompt + text).group()

    def judge(self, prompts, texts, answers):
        parsed = [self.parse(p, t) for p, t in zip(prompts, texts)]
        self.right = getattr(self, "right", 0) + sum(t.strip() == a for t, a in zip(texts, answers))
        return [float(x == a) for x, a in zip(parsed, answers)], sum(x is not None for x in parsed) / len(parsed)

    def prove(self):
        assert max(h["reward"] for h in self.history) == 0 and min(self.evals) > 0.2 and self.right > 50
        return {"right_completions_with_reward_0": self.right, "eval": self.evals}


if __name__ == "__main__":
    Case().main()
