from own1 import *


class Run(Packed):
    STEPS, LR, BETA = 14, 1.5e-3, 0.25
    seed = 15
    added = []

    def shaped(self, rewards, logp, ref, mask):
        penalty = ((ref - logp) * mask).sum(1)
        self.added.append((self.BETA * -penalty).mean().item())
        return rewards - self.BETA * penalty, penalty

    def prove(self):
        kl = [h["kl"] for h in self.history]
        assert sum(a > 0 for a in self.added[1:]) >= 10 and max(kl[-4:]) > 0.05, (self.added, kl)
        return {"added_to_reward_for_leaving_the_reference": self.added}


Run().main()
