from own1 import *


class Run(Fleet):
    GENERATIONS, MINI, LR, WARMUP, BETA = 7, 2, 2e-3, 0, 0.04
    seed = 17

    def before_generation(self, generation):
        if generation == 4:
            state = {"model": copy.deepcopy(self.policy.state_dict())}
            self.policy = FleetNet(self.V)
            self.policy.load_state_dict(state["model"])
            self.reference = copy.deepcopy(self.policy).requires_grad_(False)
            self.optimizer = self.make_optimizer()
            self.sampler = self.make_sampler()

    def prove(self):
        kl = [h["kl"] for h in self.history]
        assert kl[7] > 0.004 and kl[8] < 1e-6, kl
        return {"kl_before_and_after_resume": [kl[7], kl[8]]}


Run().main()
