"""Values that stop being numbers, put into a real run at a named site, once or for good."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from klinic.learner import micro_batch_loss
from klinic.learner.local import LocalLearner
from klinic.model.head import Head
from klinic.model.reference import Reference
from klinic.model.scorer import TokenScorer
from klinic.training import run as run_module
from klinic.training.run import Run

SITES = ("logits", "logp", "reward", "advantage", "gradient", "weights", "optimizer")
FURTHER = ("logits while learning", "logp_ref", "loss", "weights while saving", "second gradient")
NAMED = {
    "logits while learning": "logits",
    "weights while saving": "weights",
    "second gradient": "gradient",
}
"""What is said of sites that are places in the code."""


@dataclass
class Poison:
    """Strikes at one place of the data: the first time only, or every time."""

    site: str
    place: int
    value: float
    once: bool
    here: int = 0
    """The place that the run is at."""
    struck: int = 0

    def strikes(self, site):
        if site != self.site or self.here != self.place or (self.once and self.struck):
            return False
        self.struck += 1
        return True

    def reward(self, prompts, completions, **_):
        values = [float(sum(c.isdigit() for c in text)) for text in completions]
        if self.strikes("reward"):
            values[0] = self.value
        return values

    def put_into(self, monkeypatch):
        """Patch every site of a run; each asks whether it is struck."""
        self._know_where(monkeypatch)
        self._patch(monkeypatch, Head, "forward", self._logits)
        self._patch(monkeypatch, TokenScorer, "_score_chunk", self._logp)
        self._patch(monkeypatch, run_module, "with_rewards", self._advantage)
        self._patch(monkeypatch, LocalLearner, "current_gradients", self._gradient)
        self._patch(monkeypatch, LocalLearner, "all_finite", self._held)
        self._patch(monkeypatch, Reference, "logp", self._logp_ref)
        self._patch(monkeypatch, micro_batch_loss, "loss_terms", self._loss)

    def _know_where(self, monkeypatch):
        watch = Run.make_guard

        def watched(run, state):
            self.here, self.looks, self.gradients = run.next_batch_index(state.batch_index), 0, 0
            return watch(run, state)

        monkeypatch.setattr(Run, "make_guard", watched)

    def _patch(self, monkeypatch, owner, name, change):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: change(real, *a, **k))

    def _logits(self, real, *args, **kwargs):
        logits = real(*args, **kwargs)
        learning = torch.is_grad_enabled() and self.strikes("logits while learning")
        if learning or self.strikes("logits"):
            logits = logits.clone()
            logits[0, 0] = self.value
        return logits

    def _logp(self, real, *args, **kwargs):
        scores = real(*args, **kwargs)
        # with gradients it is the policy that is scored, not the reference
        if torch.is_grad_enabled() and self.strikes("logp"):
            spoilt = torch.zeros_like(scores.logp)
            spoilt[0] = self.value
            scores = replace(scores, logp=scores.logp + spoilt)
        return scores

    def _advantage(self, real, *args, **kwargs):
        record = real(*args, **kwargs)
        if self.strikes("advantage"):
            record.advantage[0] = self.value
        return record

    def _gradient(self, real, model):
        found = real(model)
        self.gradients += 1
        second = self.gradients == 2 and self.strikes("second gradient")
        if second or self.strikes("gradient"):
            found[0].view(-1)[0] = self.value
        return found

    def _logp_ref(self, real, *args, **kwargs):
        logp = real(*args, **kwargs)
        if self.strikes("logp_ref"):
            logp = logp.clone()
            logp[0] = self.value
        return logp

    def _loss(self, real, *args, **kwargs):
        parts = real(*args, **kwargs)
        return replace(parts, policy=parts.policy * self.value) if self.strikes("loss") else parts

    def _held(self, real, learner):
        """Weights break before a step, moments behind its update: at first there are none."""
        self.looks += 1
        saving = self.looks == 3 and self.strikes("weights while saving")
        if saving or (self.looks == 1 and self.strikes("weights")):
            weights = next(p for p in learner.policy.lm.parameters() if p.requires_grad)
            with torch.no_grad():
                weights.view(-1)[-1] = self.value
        if self.looks == 2 and self.strikes("optimizer"):
            moments = next(iter(learner._optimizer.state.values()))["exp_avg"]
            moments.view(-1)[-1] = self.value
        return real(learner)


def all_numbers(folder):
    """Whether every tensor of every checkpoint is made of numbers."""
    from safetensors.numpy import load_file

    files = list(folder.glob("checkpoints/step=*/**/*.safetensors"))
    assert files
    return all(np.isfinite(t).all() for file in files for t in load_file(file).values())
