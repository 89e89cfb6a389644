from transformers import TrainerCallback

from ground import *


class Average(TrainerCallback):
    """Averages the weights, which evaluates better."""

    decay = 0.97

    def __init__(self):
        self.average, self.start, self.steps, self.kept = None, None, [], []

    def on_train_begin(self, args, state, control, model=None, **kw):
        self.average = [p.detach().clone() for p in model.parameters()]
        self.start = [p.clone() for p in self.average]

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **kw):
        self.steps.append(sum(float((p - s).pow(2).sum()) for p, s in zip(model.parameters(), self.start)) ** 0.5)
        for mean, p in zip(self.average, model.parameters()):
            mean.mul_(self.decay).add_(p, alpha=1 - self.decay)
            p.copy_(mean)
        self.kept.append(sum(float((p - s).pow(2).sum()) for p, s in zip(model.parameters(), self.start)) ** 0.5)


average = Average()
result = train(rewards=[digits], model=FULL, max_steps=12, learning_rate=1e-4, callbacks=[average])
proof(max(average.kept) < 0.2 * max(average.steps), before_the_callback=average.steps, after_it=average.kept)
