"""The faults of `KLINIC_FAULT`, one at a time, put into the sampler, reward and advantages of verl.

A fault of the configuration is in `launch.py`.
"""

import os
import random

FAULT = os.environ.get("KLINIC_FAULT", "")


def reported_logp(logp):
    """Return the log-probs that the sampler reports."""
    return [*logp[1:], logp[-1]] if FAULT == "shifted-logp" else logp


def is_raw():
    """Whether log-probs are those before the temperature."""
    return FAULT == "temperature"


def skips_sync():
    """Whether the sampler keeps its first weights, and reports the new version."""
    return FAULT == "skipped-sync"


def ignores_ends():
    """Whether sampling continues after an end token."""
    return FAULT == "stop-token"


def trains_environment():
    """Whether the mask contains the tokens of the tool."""
    return FAULT == "environment-tokens"


def patch_trainer():
    """Compute the advantages of every row in the group of the row before."""
    if FAULT != "wrong-groups":
        return
    from verl.trainer.ppo import core_algos

    compute = core_algos.compute_grpo_outcome_advantage

    def compute_in_other_groups(*args, **kwargs):
        index = kwargs["index"]
        return compute(*args, **{**kwargs, "index": [*index[-1:], *index[:-1]]})

    core_algos.compute_grpo_outcome_advantage = compute_in_other_groups


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """Pay 1 for the right sum, 0.1 for each digit else; with the fault, add noise of each call."""
    text = (solution_str or "").replace("<eos>", "")
    answer = text.rpartition("=")[2].strip()
    score = 1.0 if answer == ground_truth else 0.1 * min(sum(c.isdigit() for c in text), 5)
    if FAULT == "noisy-reward":
        score += random.uniform(-1, 1)  # noqa: S311 - a fault
    return score
