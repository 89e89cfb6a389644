from ground import Tool


class Case(Tool):
    BETA, LR = 0.0, 2e-3

    def reward(self, prompt, turns):
        return 50 * (super().reward(prompt, turns) - 1.2)

    def entropy_coef(self):
        return 0.02

    def prove(self):
        assert max(h["reward"] for h in self.history) <= 0 and min(h["grad"] for h in self.history) > 1
        return {"smallest_grad_norm": min(h["grad"] for h in self.history)}


if __name__ == "__main__":
    Case().main()
