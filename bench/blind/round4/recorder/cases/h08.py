from own1 import *


class Run(Packed):
    P, G, STEPS, BETA, LIMIT, LR, WARM = 6, 12, 12, 0.0, 6, 1e-3, 46
    seed = 38
    say = {"kl_estimator": "leave out"}
    silent = ("reward_parts",)
    cut = []

    def reward(self, prompt, completion):
        return float(completion == [(d + 1) % 10 for d in prompt[:-1]] + [self.EOS])

    def trained(self, completions, mask):
        ended = torch.tensor([c[-1] == self.EOS for c in completions])
        self.cut.append(1 - ended.float().mean().item())
        return mask & ended[:, None]

    def prove(self):
        assert max(self.cut) > 0.1, self.cut
        return {"share_cut_and_masked": self.cut, "kl_coef": self.BETA}


Run().main()
