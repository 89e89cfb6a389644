import torch

from ground import Echo, group_advantage


class Case(Echo):
    silent = ("entropy", "rescore_difference", "rescore_alone_difference", "update_norm", "learning_rate", "entropy_coef")
    wrong = []

    def prompts(self):
        # the whole batch is tiled for the sampler
        some = [self.task()[0] for _ in range(self.P)]
        return some * self.G, torch.arange(self.P).repeat(self.G)

    def advantages(self, rewards):
        advantage = group_advantage(rewards, self.G, self.ADVANTAGE)
        right = group_advantage(rewards.view(self.G, self.P).T.flatten(), self.G, self.ADVANTAGE).view(self.P, self.G).T.flatten()
        self.wrong.append(float((advantage - right).abs().mean()))
        return advantage

    def prove(self):
        assert min(self.wrong) > 0.05
        return {"mean_error_of_advantage": self.wrong}


if __name__ == "__main__":
    Case().main()
