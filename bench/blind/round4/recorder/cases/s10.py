from ground import *


class Run(Echo):
    P, G, STEPS, LR = 6, 8, 12, 1.5e-3
    seed = 12
    seen = []

    def prompts(self):
        seed_all(1234)
        prompts, group = super().prompts()
        self.seen.append(tuple(map(tuple, prompts)))
        return prompts, group

    def prove(self):
        assert len(set(self.seen)) == 1 and len(self.seen) == self.STEPS
        return {"different_batches": len(set(self.seen)), "steps": len(self.seen)}


Run().main()
