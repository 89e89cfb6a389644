"""A plain loop in NumPy that `klinic.Recorder` follows: a table policy with exact log-probs.

Completions repeat a digit of their prompt. Everything about the loop is as it should be, whatever
its shape: mini-batches, epochs, dropped rows, samples ahead.
"""

from dataclasses import dataclass, field

import numpy as np

PROMPTS, GROUP, LENGTH, VOCABULARY, EOS = 10, 8, 12, 12, 11
RATE = 8.0


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@dataclass
class Batch:
    """Completions with what the loop knows about them; one entry per row."""

    prompts: list
    completions: list
    logp_sampler: list
    group: np.ndarray
    reward: np.ndarray
    advantage: np.ndarray
    version: int

    def rows(self, index):
        """Return some of the rows."""
        lists = [[values[n] for n in index] for values in (self.prompts, self.completions)]
        logp = [self.logp_sampler[n] for n in index]
        arrays = (self.group[index], self.reward[index], self.advantage[index])
        return Batch(*lists, logp, *arrays, self.version)


@dataclass
class Policy:
    """Logits by prompt and previous token."""

    table: np.ndarray = field(default_factory=lambda: np.zeros((PROMPTS, VOCABULARY, VOCABULARY)))
    version: int = 0

    def scores(self, prompt, ids):
        """Return log-probs of all outcomes at every position of a completion."""
        return log_softmax(self.table[prompt, [prompt, *ids[:-1]]])

    def logp(self, batch):
        rows = zip(batch.prompts, batch.completions, strict=True)
        return [self.scores(p[0], ids)[np.arange(len(ids)), ids] for p, ids in rows]

    def entropy(self, batch):
        rows = zip(batch.prompts, batch.completions, strict=True)
        every = [self.scores(p[0], ids) for p, ids in rows]
        return [-(np.exp(scores) * scores).sum(-1) for scores in every]

    def update(self, batch):
        """Follow the policy gradient of the batch."""
        num_tokens = sum(map(len, batch.completions))
        step = np.zeros_like(self.table)
        for p, ids, advantage in zip(
            batch.prompts, batch.completions, batch.advantage, strict=True
        ):
            before = [p[0], *ids[:-1]]
            pull = np.eye(VOCABULARY)[ids] - np.exp(self.scores(p[0], ids))
            np.add.at(step[p[0]], before, advantage * pull)
        self.table = self.table + RATE * step / num_tokens
        self.version += 1


def sample(policy, random):
    """Return a generation with its rewards and advantages."""
    prompts = [[n % PROMPTS] for n in range(PROMPTS) for _ in range(GROUP)]
    completions = [sample_row(policy, p[0], random) for p in prompts]
    group = np.repeat(np.arange(PROMPTS), GROUP)
    reward = np.array(
        [np.mean(np.array(ids) == p[0]) for p, ids in zip(prompts, completions, strict=True)]
    )
    mean = reward.reshape(PROMPTS, GROUP).mean(1)[group]
    batch = Batch(prompts, completions, [], group, reward, reward - mean, policy.version)
    batch.logp_sampler = policy.logp(batch)
    return batch


def sample_row(policy, prompt, random, start=None):
    """Return a completion; `start` is the token before it, by default the prompt's."""
    ids = []
    while len(ids) < LENGTH and (not ids or ids[-1] != EOS):
        last = ids[-1] if ids else prompt if start is None else start
        ids.append(
            int(random.choice(VOCABULARY, p=np.exp(log_softmax(policy.table[prompt, last]))))
        )
    return ids


def record_samples(recorder, batch, **extra):
    """Hand a generation to the recorder."""
    recorder.record_samples(
        prompt_ids=batch.prompts,
        completion_ids=batch.completions,
        logp_sampler=batch.logp_sampler,
        reward=batch.reward,
        group=batch.group,
        **extra,
    )


def train_step(recorder, policy, batch, reference, *, old=None, **extra):
    """Make an update and hand it to the recorder; `old` is the policy of the ratio."""
    logp = policy.logp(batch)
    scored = {"logp": logp, "logp_old": logp if old is None else old.logp(batch)}
    scored |= {"logp_ref": reference.logp(batch), "entropy": policy.entropy(batch)}
    before = policy.table
    policy.update(batch)
    recorder.record_step(
        prompt_ids=batch.prompts,
        completion_ids=batch.completions,
        advantage=batch.advantage,
        kl_coef=0.0,
        loss=0.1,
        grad_norm=float(np.linalg.norm(policy.table - before) / RATE),
        rescore_difference=0.0,
        rescore_alone_difference=0.0,
        **scored,
        **extra,
    )
