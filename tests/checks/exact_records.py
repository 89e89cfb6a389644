"""Records of a policy with known logits: everything about them is exact."""

from dataclasses import replace

import numpy as np

from klinic.checks import Case
from klinic.evidence.record import StepRecord

ROWS, LENGTH, VOCABULARY, GROUP = 24, 10, 32, 4
RUN = {
    "eos_ids": [1],
    "vocabulary_size": VOCABULARY,
    "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
    "sampler": {"max_version_lag": 0},
    "policy": {"dtype": "fp32", "num_experts": 0},
    "reference": {"kind": "copy", "source": "start", "wanted": "start"},
    "estimator": "unbiased",
    "advantage": "leave_one_out",
}


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def distributions(seed=0):
    """Return the policy's log-probs of every outcome at every token."""
    random = np.random.default_rng(seed)
    return log_softmax(2 * random.normal(size=(ROWS * LENGTH, VOCABULARY)))


def record(seed=0, *, step=1, version=0, drawn_from=None, noise=0.0, **columns):
    """Return completions drawn from a policy, or from other distributions beside it."""
    random = np.random.default_rng(seed + 1000)
    logp = distributions(seed)
    source = logp if drawn_from is None else drawn_from
    ids = np.array([random.choice(VOCABULARY, p=np.exp(row) / np.exp(row).sum()) for row in source])
    picked = np.arange(len(ids)), ids
    old = logp[picked]
    rewards = random.choice([0.0, 0.5, 1.0], size=ROWS)
    groups = np.repeat(np.arange(ROWS // GROUP), GROUP)
    mean = np.array([rewards[groups == g].mean() for g in groups])
    made = StepRecord(
        step=step,
        row_offsets=np.arange(ROWS + 1) * LENGTH,
        group=groups,
        sample=np.arange(ROWS) % GROUP,
        token_ids=ids,
        loss_mask=np.ones(len(ids), bool),
        emitted_by=np.zeros(len(ids), np.int8),
        finish_reason=np.array(["stop"] * ROWS, "<U6"),
        reward=rewards,
        advantage=(rewards - mean) * GROUP / (GROUP - 1),
        logp=old,
        logp_old=old,
        logp_ref=old,
        logp_sampler=old + noise * random.normal(size=len(ids)),
        entropy=-(np.exp(logp) * logp).sum(-1),
        weight_version=np.full(len(ids), version),
        cached_tokens=np.zeros(ROWS, np.int64),
        prompt_ids_match=np.ones(ROWS, bool),
        round_trip=np.ones(ROWS, bool),
        facts={
            "learner_version": version,
            "weights_published": f"w{version}",
            "weights_loaded": f"w{version}",
            "reference_fingerprint": "r",
            "grad_norm": 1.0,
            "learning_rate": 1e-3,
            "loss": 0.1,
        },
    )
    return replace(made, **columns)


def case(found, *, run=None, earlier=(), start=None, metrics=None, answers=None):
    """Return a case whose run says nothing unusual."""
    return Case(
        record=found,
        earlier=tuple(earlier),
        start=start,
        run={**RUN, **(run or {})},
        metrics=metrics or {},
        probe_results=answers or {},
    )


def judged(check, found, **more):
    """Return the verdict of a check's module."""
    return check.CHECK(case(found, **more)).verdict


def moved(found, size, seed=5):
    """Return the record with a policy that has left sampler and reference by so many nats."""
    random = np.random.default_rng(seed)
    logp = found.logp_old + size * random.normal(size=len(found.logp_old))
    facts = {**found.facts, "learner_version": 3, "weights_published": "w3", "weights_loaded": "w3"}
    versions = np.full(len(logp), 3)
    return replace(found, logp=logp, logp_old=logp, facts=facts, step=4, weight_version=versions)
