from ground import Tool


class Case(Tool):
    T = 0.7

    def learner_temperature(self):
        return 1.0

    def make_reference(self):
        return self.policy.eval()

    def prove(self):
        assert self.history[0]["gap"] > 0.02 and max(h["kl"] for h in self.history) < 1e-7 < min(h["moved"] for h in self.history)
        return {"gap": [h["gap"] for h in self.history], "moved": [h["moved"] for h in self.history]}


if __name__ == "__main__":
    Case().main()
