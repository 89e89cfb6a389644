import copy

import torch

from ground import Tool, fingerprint


class Case(Tool):
    LAG = 2
    say = {"max_version_lag": 2}

    def publish(self, step):
        """The sampler runs two updates ahead of the learner's data, on purpose."""
        self.states = getattr(self, "states", [])
        self.states.append(copy.deepcopy(self.policy.state_dict()))
        version = max(0, step - self.LAG)
        self.sampler.load_state_dict(self.states[version])
        self.lags = getattr(self, "lags", []) + [step - version]
        return version

    def hashes(self):
        return {"weights_published": fingerprint(self.sampler), "weights_loaded": fingerprint(self.sampler)}

    def importance(self, logp, logp_sampler):
        return (logp - logp_sampler).exp().nan_to_num(1.0).clamp(max=2.0)

    def prove(self):
        assert max(self.lags) == 2
        return {"lags": self.lags, "gap": [h["gap"] for h in self.history]}


if __name__ == "__main__":
    Case().main()
