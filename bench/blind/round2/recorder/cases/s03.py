import copy

import torch

from ground import Echo, Recurrent


class Case(Echo):
    STEPS, LR, BETA = 12, 2e-3, 0.05

    def setup(self, checkpoint):
        """What the script does when it is started again with --resume."""
        self.policy = Recurrent(self.V)
        self.policy.load_state_dict(checkpoint["policy"])
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=self.LR)
        self.optimizer.load_state_dict(checkpoint["optimizer"])

    def between(self, step):
        if step == 7:  # the job was preempted
            saved = {"policy": copy.deepcopy(self.policy.state_dict()), "optimizer": copy.deepcopy(self.optimizer.state_dict())}
            self.setup(saved)

    def prove(self):
        kl = [h["kl"] for h in self.history]
        assert kl[7] > 0.005 and abs(kl[8]) < 1e-6
        return {"kl_before": kl[7], "kl_after": kl[8]}


if __name__ == "__main__":
    Case().main()
