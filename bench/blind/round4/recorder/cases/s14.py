from own1 import *


class Run(Fleet):
    GENERATIONS, MINI, MICRO, WARMUP = 6, 2, 6, 2
    seed = 16
    compared = []

    def backward(self, rows, tokens):
        value, logps, entropies = 0.0, [None] * len(rows), [None] * len(rows)
        full = torch.autograd.grad(self.loss(rows, tokens)[0], list(self.policy.parameters()))
        width = -(-len(rows) // self.MICRO)
        for at in range(0, len(rows), width):
            some = rows[at : at + width]
            loss, logp, entropy = self.loss(some, tokens)
            self.optimizer.zero_grad()
            loss.backward()
            value += loss.item()
            logps[at : at + width], entropies[at : at + width] = list(logp.detach()), list(entropy.detach())
        full, got = torch.cat([g.flatten() for g in full]), torch.cat([p.grad.flatten() for p in self.policy.parameters()])
        self.compared.append(((full - got).norm() / (full.norm() + 1e-9)).item())
        return value, logps, entropies

    def prove(self):
        assert min(self.compared) > 0.3, self.compared
        return {"missing_share_of_gradient": self.compared}


Run().main()
