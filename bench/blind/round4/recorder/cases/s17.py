from own2 import *


class Run(Game):
    seed = 19
    STEPS = 11

    def loss_mask(self, source, mask):
        own = mask & (source == 0)
        shifted = torch.zeros_like(own)
        shifted[:, 1:] = own[:, :-1]
        return shifted & mask

    def prove(self):
        alien, missed = [h["alien"] for h in self.history], [h["missed"] for h in self.history]
        assert min(alien) > 0 and min(missed) > 0, (alien, missed)
        return {"environment_tokens_trained": alien, "own_tokens_untrained": missed}


Run().main()
