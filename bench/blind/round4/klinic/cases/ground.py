"""What all cases share: data, rewards, the call of klinic.train, the proof file. Right as it stands."""
import json
import os
import random
import sys
from pathlib import Path

import klinic
import torch

FULL = os.environ["BLIND_FULL"]
EARLY = os.environ["BLIND_EARLY"]
LETTERS = "0123456789"


def out():
    return Path(sys.argv[1])


def side(name):
    """A place for files of the case beside the run folder, such as an edited copy of a model."""
    return out().parent / f"{out().name}.{name}"


def sums(n=400, lo=10, hi=99, seed=7, keep=lambda a, b: True):
    rng, rows = random.Random(seed), []
    while len(rows) < n:
        a, b = rng.randint(lo, hi), rng.randint(lo, hi)
        if keep(a, b):
            rows.append({"prompt": f"{a}+{b}=", "answer": str(a + b)})
    return rows


def correct(completions, answer, **_):
    return [float(text.strip() == right) for text, right in zip(completions, answer)]


def digits(completions, answer, **_):
    """1 for the right sum, less for some right digits at the right places."""
    scores = []
    for text, right in zip(completions, answer):
        text = text.strip()
        same = sum(x == y for x, y in zip(text, right))
        scores.append(1.0 if text == right else 0.5 * same / max(len(text), len(right)))
    return scores


SETTINGS = dict(
    max_steps=16,
    prompts_per_step=8,
    group_size=8,
    max_completion_length=8,
    temperature=1.0,
    learning_rate=1e-4,
    kl_coef=0.02,
    loss_type="grpo",
    report_to="none",
    seed=3,
    threads=1,
    **{"learner.advantage": "group_std", "learner.micro_batch_size": 64, "loop.checkpoint_every": 0},
)


def train(rows=None, rewards=None, model=None, **over):
    settings = {**SETTINGS, **over}
    settings = {key: value for key, value in settings.items() if value is not None}
    return klinic.train(
        model=EARLY if model is None else model,
        reward_funcs=[correct] if rewards is None else rewards,
        train_dataset=sums() if rows is None else rows,
        output_dir=str(out()),
        **{"output.doctor": os.environ.get("BLIND_DOCTOR", "none")},
        **settings,
    )


def proof(ok, **numbers):
    """Write what proves that the oddity was at work, and fail if it was not."""
    Path(f"{out()}.proof.json").write_text(json.dumps({"active": bool(ok), **numbers}, indent=1, default=str))
    assert ok, numbers
