from ground import *


class Run(Tool):
    STEPS, LR = 12, 1e-3
    seed = 33
    say = {"max_version_lag": 1, "loss": "leave out", "clip_low": "leave out", "clip_high": "leave out"}
    used = []

    def publish(self, step):
        if step % 2 == 0:
            self.sampler.load_state_dict(self.policy.state_dict())
            self.sent, self.version = fingerprint(self.policy), step
        return self.version

    def hashes(self):
        return {"weights_published": self.sent, "weights_loaded": fingerprint(self.sampler)}

    def importance(self, logp, logp_sampler):
        weights = (logp - logp_sampler).exp().nan_to_num(1.0).clamp(max=2.0)
        self.used.append((weights - 1).abs().max().item())
        return weights

    def prove(self):
        gaps = [h["gap"] for h in self.history]
        assert max(gaps[0::2]) < 1e-4 and min(gaps[1::2]) > 1e-3 and max(self.used[1::2]) > 0.02, (gaps, self.used)
        return {"gap_to_sampler": gaps, "largest_weight_less_one": self.used}


Run().main()
