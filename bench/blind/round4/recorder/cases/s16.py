from own1 import *


class Run(Fleet):
    GENERATIONS, MINI, LR, WARMUP = 7, 2, 3e-5, 0
    seed = 18

    def policy_model(self):
        return super().policy_model().to(torch.bfloat16)

    def prove(self):
        start, end = flat(self.reference), flat(self.policy)
        still = (start == end).float().mean().item()
        expected = self.LR * len(start) ** 0.5
        moved = [h["moved"] for h in self.history]
        assert still > 0.6, (still, moved, expected)
        return {"share_of_weights_never_moved": still, "moved": moved, "first_adam_step_in_fp32": expected}


Run().main()
