from ground import *

GAPS = []


class LeaveOneOut(GRPOTrainer):
    """Baseline of a completion: the mean reward of the others, as in RLOO."""

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._kept = (rewards * self.reward_weights).nansum(1)
        return rewards

    def _generate_and_score_completions(self, inputs):
        out = super()._generate_and_score_completions(inputs)
        g = self.num_generations
        groups = self._kept.view(g, -1)
        others = (groups.sum(0, keepdim=True) - groups) / (g - 1)
        right = self._kept.view(-1, g)
        right = (right - (right.sum(1, keepdim=True) - right) / (g - 1)).flatten()
        out["advantages"] = (groups - others).flatten()
        GAPS.append((float((out["advantages"] - right).abs().mean()), float(right.abs().mean())))
        return out


trainer = LeaveOneOut(
    FULL, reward_funcs=[closeness], args=config(max_steps=10, learning_rate=5e-5, scale_rewards="none", per_device_train_batch_size=48, num_generations=6), train_dataset=data(lo=10, hi=99)
)


def proof(trainer, logs, before):
    gap = sum(a for a, _ in GAPS) / len(GAPS)
    size = sum(b for _, b in GAPS) / len(GAPS)
    assert gap > 0.05, GAPS
    return {"mean_error_of_advantage": gap, "mean_size_of_right_advantage": size}


go(trainer, proof)
