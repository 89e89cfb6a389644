"""Groups without a signal are replaced by others of the batch, as DAPO does by sampling more."""
from ground import *

REPLACED = []


class InformativeOnly(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        out = super()._generate_and_score_completions(inputs)
        size = self.num_generations
        live = out["advantages"].view(-1, size).abs().sum(1) > 1e-6
        if live.any() and not live.all():
            source = torch.arange(len(live))
            good = source[live]
            source[~live] = good[torch.arange(int((~live).sum())) % len(good)]
            pick = (source[:, None] * size + torch.arange(size)).flatten()
            for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"):
                out[key] = out[key][pick]
            REPLACED.append(int((~live).sum()))
        return out


trainer = InformativeOnly(model=FULL, reward_funcs=accuracy, args=config(learning_rate=1e-4, beta=0.02), train_dataset=data(seed=17))


def proof(trainer, logs, before):
    assert sum(REPLACED) >= 10 and logs[0]["kl"] > 0.05, logs[0]["kl"]
    return {"groups replaced, by step": REPLACED, "kl before the first update": logs[0]["kl"]}


go(trainer, proof)
