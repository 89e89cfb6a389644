from own1 import *


class Run(Packed):
    STEPS, LR, WARM = 12, 1.5e-3, 38
    seed = 14
    off = []

    def arranged(self, advantage, prompts, completions):
        lengths = [len(p) + len(c) for p, c in zip(prompts, completions)]
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        self.off.append((advantage[order] - advantage).abs().mean().item())
        return advantage[order]

    def prove(self):
        assert min(self.off) > 0.05, self.off
        return {"advantage_error": self.off}


Run().main()
