import math

from ground import *

DEAD = []


def log_score(completions, answer, **_):
    """Log of the share of right digits: a small error costs little, a large one much."""
    return [math.log(s) if s > 0 else -math.inf for s in closeness(completions, answer)]


class Watched(GRPOTrainer):
    def _calculate_rewards(self, *args):
        self._seen = super()._calculate_rewards(*args)
        return self._seen

    def _generate_and_score_completions(self, inputs):
        out = super()._generate_and_score_completions(inputs)
        r, a = self._seen.sum(1).view(-1, self.num_generations), out["advantages"].view(-1, self.num_generations)
        mixed = r.max(1).values > r.min(1).values
        DEAD.append((int((mixed & (a.abs().sum(1) == 0)).sum()), int(mixed.sum())))
        return out


trainer = Watched(EARLY, reward_funcs=log_score, args=config(max_steps=10, learning_rate=3e-4), train_dataset=data(lo=10, hi=99))


def proof(trainer, logs, before):
    dead, mixed = map(sum, zip(*DEAD))
    assert dead / mixed > 0.4, DEAD
    return {"share_of_mixed_groups_without_advantage": dead / mixed, "groups": DEAD}


go(trainer, proof)
