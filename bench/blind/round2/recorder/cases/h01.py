from ground import Echo, Recurrent


class Case(Echo):
    STEPS, LR = 11, 3e-3
    say = {"untrained": True, "warmup_steps": 6}

    def policy_model(self):
        return Recurrent(self.V)

    def reward(self, prompt, completion):
        return float(completion[0] == prompt[0])

    def learning_rate(self, step):
        return self.LR * min(1.0, step / 6)

    def prove(self):
        assert self.history[0]["moved"] == 0 and self.history[0]["reward"] < 0.3
        return {"moved": [h["moved"] for h in self.history]}


if __name__ == "__main__":
    Case().main()
