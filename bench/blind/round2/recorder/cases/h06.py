import torch

from ground import Sums


class Case(Sums):
    DTYPE, SAMPLER_DTYPE, LR = "bf16", "fp32", 5e-5

    def forward(self, model, ids, mask):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(model, ids, mask)

    def prove(self):
        gaps = [h["gap"] for h in self.history]
        assert gaps[0] > 1e-4
        return {"gap": gaps}


if __name__ == "__main__":
    Case().main()
