from ground import *


class Run(Tool):
    STEPS, LR = 12, 2e-3
    seed = 22

    def publish(self, step):
        state = {("lm_head" + k[4:] if k.startswith("head") else k): v for k, v in self.policy.state_dict().items()}
        self.sampler.load_state_dict(state, strict=False)
        return step

    def hashes(self):
        return {}

    def prove(self):
        gaps = [h["gap"] for h in self.history]
        same = torch.equal(self.sampler.head.weight, self.reference.head.weight)
        assert same and gaps[0] < 1e-4 and gaps[-1] > 0.02, gaps
        return {"sampler_head_as_at_start": same, "gap_to_sampler": gaps}


Run().main()
