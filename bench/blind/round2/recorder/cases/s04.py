import torch

from ground import Sort


class Case(Sort):
    def make_schedule(self):
        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda k: max(0.0, 1 - k / self.GENERATIONS))

    def prove(self):
        rates = [h["rate"] for h in self.history]
        moved = [h["moved"] for h in self.history]
        assert sum(r == 0 for r in rates) >= len(rates) * 0.7 and max(moved[6:]) == 0
        return {"rates": rates, "moved": moved}


if __name__ == "__main__":
    Case().main()
