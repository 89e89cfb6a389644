from own1 import *


class Run(Fleet):
    GENERATIONS, MINI, LAG, LR, WARMUP, ADVANTAGE = 7, 2, 2, 1e-3, 2, "group_mean"
    seed = 37
    say = {"loss": "leave out"}
    lags, weights = [], []

    def publish(self, generation):
        state = {"weights": copy.deepcopy(self.policy.state_dict()), "version": self.updates}
        ready = getattr(self, "waiting", state)
        self.sampler.load_state_dict(ready["weights"])
        self.waiting, self.loaded = state, ready
        self.lags.append(self.updates - ready["version"])
        return ready["version"]

    def published(self):
        sent = copy.deepcopy(self.policy)
        sent.load_state_dict(self.loaded["weights"])
        return {"weights_published": fingerprint(sent.to(self.SAMPLER_DTYPE)), "weights_loaded": fingerprint(self.sampler)}

    def weigh(self, old, sampled, mask):
        weights = torch.where(mask, (old - sampled).exp(), 1.0).clamp(max=2.0)
        self.weights.append((weights - 1).abs().max().item())
        return weights

    def prove(self):
        assert self.lags == [0] + [2] * 6 and max(self.weights[2:]) > 0.1, (self.lags, self.weights)
        return {"lag": self.lags, "largest_weight_less_one": self.weights, "gap_of_generation": self.gaps}


Run().main()
