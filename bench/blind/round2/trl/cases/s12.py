"""Rollouts in bf16 for speed, training in fp32."""
from ground import *


class HalfRollouts(GRPOTrainer):
    def _generate_single_turn(self, *args, **kw):
        self.model.to(torch.bfloat16)
        try:
            return super()._generate_single_turn(*args, **kw)
        finally:
            self.model.to(torch.float32)


trainer = HalfRollouts(model=EARLY, reward_funcs=closeness, args=config(max_steps=8, learning_rate=2e-5, beta=0.01), train_dataset=data(seed=41))


def proof(trainer, logs, before):
    same = total = 0
    for n, p in trainer.model.named_parameters():
        same += int((p.detach().to(torch.bfloat16) == before[n].to(torch.bfloat16)).sum())
        total += p.numel()
    assert same / total > 0.7, same / total
    return {"share of weights that are, in bf16, where they began": same / total, "largest change": moved(trainer, before)}


go(trainer, proof)
