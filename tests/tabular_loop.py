"""A training loop in NumPy that drives `klinic.Recorder`, with faults to switch on.

The policy is a table of logits by prompt, position and token, so every log-prob, every loss and
every gradient is exact. Completions end with a token of their own; the reward is the fraction of
tokens that are the prompt's.
"""

import hashlib
import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from klinic import Recorder
from klinic.checks import CHECKS
from klinic.doctor.cases import read_cases
from klinic.doctor.diagnosis import Diagnosis, diagnose

PROMPTS, GROUP, LENGTH, VOCABULARY = 6, 8, 6, 8
EOS = VOCABULARY - 1
ROWS = PROMPTS * GROUP
CLIP = 0.2


@dataclass(frozen=True)
class Loop:
    """The settings of a loop; the factors are 1 (0 for entropy) in a healthy one."""

    steps: int = 12
    policy_factor: float = 1.0
    kl_factor: float = 1.0
    entropy_factor: float = 1.0
    policy_form: str = "ratio"
    kl_form: str = "k3"
    aggregation: str = "token_mean"
    kl_coef: float = 0.1
    entropy_coef: float = 0.0
    loss_scale: float = 1.0
    learning_rate: float = 20.0
    updates: int = 1
    sharpness: float = 1.0
    """Standard deviation of the logits at the start."""
    clears_gradient: bool = True
    clears_every: int = 1
    equal_every: int = 0
    """Every how many steps all completions have one reward."""
    lost_at: int = 0
    """The step before which the weights are those of the start again; 0 for never."""
    processes: int = 1
    sends_gradients: bool = True
    advantage_shift: int = 0
    """Tokens by which the advantages of a row are misplaced; recorded per token if not 0."""
    by_token: bool = False
    seed: int = 0
    declares: bool = False
    """Whether the recorder gets the aggregation of the loss."""


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


class Batch:
    """Completions of all prompts, with masks and advantages by token."""

    def __init__(self, table, random, loop, step):
        self.prompt = np.repeat(np.arange(PROMPTS), GROUP)
        self.ids = np.zeros((ROWS, LENGTH), np.int64)
        self.mask = np.zeros((ROWS, LENGTH), bool)
        alive = np.ones(ROWS, bool)
        probabilities = np.exp(log_softmax(table))
        for t in range(LENGTH):
            self.mask[:, t] = alive
            p = probabilities[self.prompt, t]
            drawn = (p.cumsum(1) < random.random((ROWS, 1)) * p.sum(1, keepdims=True)).sum(1)
            self.ids[:, t] = drawn.clip(max=EOS)
            alive = alive & (self.ids[:, t] != EOS)
        hits = ((self.ids == self.prompt[:, None]) & self.mask).sum(1)
        self.reward = np.round(hits / LENGTH, 6)
        if loop.equal_every and step % loop.equal_every == 0:
            self.reward = np.ones(ROWS)
        by_group = self.reward.reshape(PROMPTS, GROUP)
        self.advantage = (by_group - by_group.mean(1, keepdims=True)).ravel()
        spread = np.where(self.mask, self.advantage[:, None], 0.0)
        self.token_advantage = np.roll(spread, loop.advantage_shift, axis=1)
        self.old = self.logp(table)

    def logp(self, table):
        """Return the log-probs of the tokens."""
        rows = log_softmax(table)[self.prompt[:, None], np.arange(LENGTH)]
        return np.take_along_axis(rows, self.ids[..., None], -1)[..., 0]

    def weights(self, aggregation):
        """Return the weight of each token in the loss."""
        mask = self.mask.astype(float)
        if aggregation == "token_mean":
            return mask / mask.sum()
        if aggregation == "sequence_mean":
            return mask / mask.sum(1, keepdims=True) / ROWS
        return mask / LENGTH / ROWS


POLICY_FORMS = {
    # value and derivative in logp
    "ratio": lambda logp, r, a: (
        -np.minimum(r * a, r.clip(1 - CLIP, 1 + CLIP) * a),
        np.where((a > 0) & (r > 1 + CLIP) | (a < 0) & (r < 1 - CLIP), 0.0, -r * a),
    ),
    "unclipped": lambda logp, r, a: (-r * a, -r * a),
    "log-prob": lambda logp, r, a: (-a * logp, -a),
}
KL_FORMS = {
    "k1": lambda d, r: (-d, np.ones_like(d)),
    "k2": lambda d, r: (d**2 / 2, -d),
    "k3": lambda d, r: (np.expm1(d) - d, -np.expm1(d)),
    "ratio k3": lambda d, r: (r * (np.expm1(d) - d), -r * d),
}


def loss_and_gradient(table, reference, batch, loop):
    """Return the loss and its gradient in the table, faults included."""
    logp, logp_ref = batch.logp(table), batch.logp(reference)
    ratio, weights = np.exp(logp - batch.old), batch.weights(loop.aggregation)
    policy, d_policy = POLICY_FORMS[loop.policy_form](logp, ratio, batch.token_advantage)
    kl, d_kl = KL_FORMS[loop.kl_form](logp_ref - logp, ratio)
    coef = loop.kl_factor * loop.kl_coef
    rows = log_softmax(table)
    p = np.exp(rows)
    entropy = -(p * rows).sum(-1)
    bonus = loop.entropy_factor * loop.entropy_coef
    at = batch.prompt[:, None], np.broadcast_to(np.arange(LENGTH), batch.ids.shape)
    terms = loop.policy_factor * policy + coef * kl - bonus * entropy[at]
    slope = weights * (loop.policy_factor * d_policy + coef * d_kl)
    gradient = np.zeros_like(table)
    np.add.at(gradient, (*at, batch.ids), slope)
    np.subtract.at(gradient, at, slope[..., None] * p[at])
    d_entropy = -p * (rows + entropy[..., None])
    np.subtract.at(gradient, at, (weights * bonus)[..., None] * d_entropy[at])
    return loop.loss_scale * (weights * terms).sum(), loop.loss_scale * gradient


def fingerprint(table):
    """Return a hash of the weights."""
    return hashlib.sha256(table.tobytes()).hexdigest()[:12]


def train(folder, loop):
    """Run the loop, and record it."""
    random = np.random.default_rng(loop.seed)
    reference = loop.sharpness * random.normal(size=(PROMPTS, LENGTH, VOCABULARY))
    start = reference.copy()
    tables = [start.copy() for _ in range(loop.processes)]
    buffer = np.zeros_like(start)
    declared = {"aggregation": loop.aggregation} if loop.declares else {}
    recorder = Recorder(
        folder,
        eos_ids=[EOS],
        vocabulary_size=VOCABULARY,
        untrained=True,
        advantage="group_mean",
        group_size=GROUP,
        max_version_lag=loop.updates - 1,
        doctor="none",
        console=Console(file=io.StringIO()),
        **declared,
    )
    number = 0
    with recorder:
        for generation in range(1, loop.steps + 1):
            if generation == loop.lost_at:
                tables = [start.copy() for _ in tables]
            batch = Batch(tables[0], random, loop, generation)
            record_samples(recorder, batch)
            version = number
            for _ in range(loop.updates):
                step = replace_logs(batch, tables, reference, loop)
                if loop.clears_gradient and number % loop.clears_every == 0:
                    buffer = np.zeros_like(buffer)
                buffer = buffer + step["gradient"]
                for rank in range(loop.processes):
                    tables[rank] = tables[rank] - loop.learning_rate * rank_update(
                        buffer, random, rank, loop
                    )
                step |= {"weight_version": version, "grad_norm": float(np.linalg.norm(buffer))}
                record_update(recorder, batch, step, tables, loop)
                number += 1


def rank_update(buffer, random, rank, loop):
    """Return the gradient that a process applies: its own, if gradients are not sent."""
    if rank == 0 or loop.sends_gradients:
        return buffer
    return buffer + 0.1 * random.normal(size=buffer.shape)


def replace_logs(batch, tables, reference, loop):
    """Return what one update computes; each process scores its own rows."""
    owner = np.arange(ROWS) * loop.processes // ROWS
    logp = np.choose(owner[:, None], [batch.logp(table) for table in tables])
    loss, gradient = loss_and_gradient(tables[0], reference, batch, loop)
    entropy = -(np.exp(log_softmax(tables[0])) * log_softmax(tables[0])).sum(-1)
    return {
        "loss": loss,
        "gradient": gradient,
        "logp": logp,
        "logp_old": batch.old if loop.updates > 1 else logp,
        "logp_ref": batch.logp(reference),
        "entropy": entropy[batch.prompt[:, None], np.arange(LENGTH)],
        "process": owner,
    }


def record_samples(recorder, batch):
    """Record what was sampled."""
    recorder.record_samples(
        prompt_ids=batch.prompt[:, None].tolist(),
        completion_ids=batch.ids,
        completion_mask=batch.mask,
        logp_sampler=batch.old,
        group=batch.prompt,
        reward=batch.reward,
    )


def record_update(recorder, batch, step, tables, loop):
    """Record one update."""
    by_token = loop.by_token or loop.advantage_shift
    ranks = {"process": step["process"]} if loop.processes > 1 else {}
    if loop.processes > 1:
        ranks["rank_weights"] = [fingerprint(table) for table in tables]
    recorder.record_step(
        prompt_ids=batch.prompt[:, None].tolist(),
        completion_ids=batch.ids,
        completion_mask=batch.mask,
        loss_mask=batch.mask,
        **{name: step[name] for name in ("logp", "logp_old", "logp_ref", "entropy")},
        advantage=batch.token_advantage if by_token else batch.advantage,
        loss=float(np.float32(step["loss"])),
        kl_coef=loop.kl_coef,
        entropy_coef=loop.entropy_coef,
        learning_rate=loop.learning_rate,
        grad_norm=step["grad_norm"],
        weight_version=step["weight_version"],
        rescore_difference=0.0,
        rescore_alone_difference=0.0,
        **ranks,
    )


def diagnose_loop(folder: Path, **settings: Any) -> Diagnosis:
    """Train with these settings and return the diagnosis."""
    train(folder, replace(Loop(), **settings))
    return diagnose(read_cases(folder), CHECKS)
