import torch

from ground import Sums, flat


class Case(Sums):
    weights_dtype, DTYPE, SAMPLER_DTYPE, LR = torch.bfloat16, "bf16", "bf16", 1e-6

    def load(self):
        model = super().load()
        self.start = flat(model)
        return model

    def prove(self):
        share = float((flat(self.policy) != self.start).float().mean())
        assert share < 0.1
        return {"share_of_weights_that_changed": share, "moved": [h["moved"] for h in self.history]}


if __name__ == "__main__":
    Case().main()
