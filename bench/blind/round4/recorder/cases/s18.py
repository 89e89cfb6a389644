from own2 import *


class Run(Game):
    T, STEPS = 0.6, 12
    seed = 20
    bare = []

    def learner_temperature(self):
        return 1.0

    def advantages(self, rewards, source, mask, turn_of, episodes):
        base = self.baseline(rewards)[:, None]
        last = turn_of.masked_fill(~mask, -1).max(1, keepdim=True).values
        out = base * ((turn_of == last) & mask)
        own = mask & (source == 0) & (base != 0)
        self.bare.append((own & (out == 0)).sum().item() / max(1, own.sum().item()))
        return out

    def prove(self):
        gaps = [h["gap"] for h in self.history]
        assert min(gaps) > 0.03 and min(self.bare) > 0.1, (gaps, self.bare)
        return {"gap_to_sampler": gaps, "share_of_own_tokens_without_credit": self.bare}


Run().main()
