from own1 import *


class Run(Fleet):
    GENERATIONS, MINI, LR, WARMUP, BETA, MICRO = 8, 2, 1e-3, 4, 0.1, 2
    seed = 36
    refreshed = []

    def refresh(self, generation):
        if generation and generation % 2 == 0:
            self.reference.load_state_dict(self.policy.state_dict())
            self.refreshed.append(self.updates)

    def prove(self):
        kl = [h["kl"] for h in self.history]
        assert self.refreshed == [4, 8, 12] and all(kl[u] < 1e-6 < kl[u - 1] for u in self.refreshed), kl
        return {"refreshed_before_update": self.refreshed}


Run().main()
