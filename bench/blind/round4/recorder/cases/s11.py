from ground import *


class Run(Echo):
    STEPS, LR, BETA = 14, 3e-3, 0.05
    seed = 13
    TARGET = 0.01
    coefs = []

    def prompts(self):
        some = [self.task()[0] for _ in range(self.P)]
        return some * self.G, torch.arange(self.P).repeat(self.G)

    def kl_coef(self, step, kl):
        if step == 0:
            self.coef = self.BETA
        elif kl > 1.5 * self.TARGET:
            self.coef = self.coef / 1.5
        elif kl < self.TARGET / 1.5:
            self.coef = self.coef * 1.5
        self.coefs.append(self.coef)
        return self.coef

    def advantages(self, rewards):
        out = group_advantage(rewards, self.G, self.ADVANTAGE)
        own = rewards.view(self.G, self.P)
        right = ((own - own.mean(0)) / (own.std(0) + 1e-4)).flatten()
        self.off = getattr(self, "off", []) + [(out - right).abs().mean().item()]
        return out

    def prove(self):
        kl = [h["kl"] for h in self.history]
        down = sum(b < a and k > self.TARGET for a, b, k in zip(self.coefs, self.coefs[1:], kl))
        assert min(self.off) > 0.05 and down >= 4 and self.coefs[-1] < self.BETA, (self.off, self.coefs, kl)
        return {"advantage_error": self.off, "kl_coef": self.coefs, "lowered_above_target": down}


Run().main()
