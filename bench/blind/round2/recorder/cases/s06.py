from ground import Sort


class Case(Sort):
    ADVANTAGE = "leave_one_out"
    kept, bias, started = [], [], False

    def advantages(self, rewards):
        by = rewards.view(-1, self.G)
        advantage = by - (by.sum(1, keepdim=True) - by) / self.G
        self.bias.append(float(advantage.mean()))
        return advantage.flatten()

    def clear(self):
        if not self.started:  # zero_grad stands above the loop
            self.optimizer.zero_grad()
            self.started = True
        else:
            self.kept.append(float(sum(p.grad.norm() ** 2 for p in self.policy.parameters()) ** 0.5))

    def prove(self):
        assert min(self.kept) > 1e-4 and min(self.bias) > 0.02
        return {"norm_of_old_gradient": self.kept, "mean_advantage": self.bias}


if __name__ == "__main__":
    Case().main()
