from ground import Echo


class Case(Echo):
    WARM, LR = 260, 3e-4
    zero = []

    def reward(self, prompt, completion):
        return 100.0 * (completion == prompt[:-1] + [self.EOS])

    def advantages(self, rewards):
        self.zero.append(float((rewards.view(-1, self.G).std(1) == 0).float().mean()))
        return super().advantages(rewards)

    def kl_coef(self, step, kl):
        """A proportional controller: towards a KL of 0.002."""
        if step == 0:
            self.coef = 0.05
        else:
            self.coef *= 1 + 0.2 * max(-1.0, min(1.0, kl / 0.002 - 1))
        self.coefs = getattr(self, "coefs", []) + [self.coef]
        return self.coef

    def prove(self):
        assert len(set(self.coefs)) > 3 and max(self.zero) > 0.2
        return {"coefficients": self.coefs, "groups_without_spread": self.zero}


if __name__ == "__main__":
    Case().main()
