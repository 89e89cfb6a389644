from own1 import *


class Run(Fleet):
    GENERATIONS, MINI, LR, WARMUP = 8, 2, 1.5e-3, 0
    seed = 6

    def make_sampler(self):
        self.average = copy.deepcopy(self.policy).requires_grad_(False)
        return super().make_sampler()

    def publish(self, generation):
        with torch.no_grad():
            for mean, new in zip(self.average.parameters(), self.policy.parameters()):
                mean.mul_(0.9).add_(new, alpha=0.1)
            for mine, mean in zip(self.sampler.parameters(), self.average.parameters()):
                mine.copy_(mean)
        return self.updates

    def published(self):
        return {}

    def prove(self):
        assert self.gaps[-1] > 5 * self.gaps[0] and self.gaps[-1] > 0.03, self.gaps
        return {"gap_of_generation": self.gaps}


Run().main()
