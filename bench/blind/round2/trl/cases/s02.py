"""Explore first, exploit later: the temperature is annealed by a callback."""
from ground import *

SEEN = []


class AnnealTemperature(TrainerCallback):
    def __init__(self, start=1.4, end=0.6):
        self.start, self.end = start, end

    def on_step_begin(self, args, state, control, **kw):
        t = self.start + (self.end - self.start) * state.global_step / max(1, state.max_steps - 1)
        trainer.temperature = t
        trainer.generation_config.temperature = t
        trainer.generation_kwargs["temperature"] = t
        SEEN.append(t)


trainer = GRPOTrainer(model=FULL, reward_funcs=closeness, args=config(max_steps=16, learning_rate=1e-4), train_dataset=data(seed=5), callbacks=[AnnealTemperature()])


def proof(trainer, logs, before):
    ids = torch.tensor([trainer.processing_class("12+34=46")["input_ids"]])
    with torch.no_grad():
        scored = trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), 2)[0][0]
        logits = trainer.model(ids).logits[0, -3:-1]
    plain = logits.log_softmax(-1).gather(-1, ids[0, -2:, None])[:, 0]
    sampled = (logits / trainer.temperature).log_softmax(-1).gather(-1, ids[0, -2:, None])[:, 0]
    assert torch.allclose(scored, plain, atol=1e-4) and not torch.allclose(scored, sampled, atol=1e-4)
    return {"sampling temperature by step": SEEN, "temperature of the loss": 1.0}


go(trainer, proof)
