"""A run folder with records in it, made without a model."""

from dataclasses import replace

import numpy as np

from klinic.evidence.files import Journal
from klinic.evidence.record import StepRecord
from klinic.evidence.run_facts import METRICS, write_run_facts, write_tokens
from klinic.evidence.store import write_record

VOCABULARY = 30


def record(step=1, *, lengths=(3, 5, 4), apart=0.0, moved=0.5, seed=0):
    """Return a step in which the sampler is `apart` and the policy has `moved`, in nats."""
    random = np.random.default_rng(seed + step)
    num = sum(lengths)
    logp = -np.abs(random.normal(size=num)).astype(np.float32)
    return StepRecord(
        step=step,
        row_offsets=np.cumsum([0, *lengths]),
        group=np.arange(len(lengths)),
        prompt_offsets=np.arange(len(lengths) + 1) * 2,
        prompt_ids=random.integers(0, VOCABULARY, len(lengths) * 2),
        reward=random.normal(size=len(lengths)),
        token_ids=random.integers(0, VOCABULARY, num),
        loss_mask=np.ones(num, bool),
        logp=logp,
        logp_old=logp,
        logp_sampler=logp - np.float32(apart),
        logp_ref=logp - np.float32(moved),
    )


def run_folder(folder, *, steps=3, texts=None, **how):
    """Write a run of some steps and return its folder."""
    folder.mkdir(parents=True)
    write_run_facts(folder, {"eos_ids": [1], "logp_old": "scored"})
    write_tokens(folder, texts or {i: f"t{i} " for i in range(VOCABULARY)})
    metrics = Journal(folder / METRICS)
    for step in range(1, steps + 1):
        write_record(folder, record(step, **how))
        metrics.append({"step": step, "reward": step / steps, "kl": 0.1, "loss": 0.0})
    (folder / "recipe.yaml").write_text(f"seed: {len(folder.name)}\n")
    return folder


def masked(made, where):
    """Return a record in which some tokens are not trained on."""
    mask = made.loss_mask.copy()
    mask[where] = False
    return replace(made, loss_mask=mask)
