"""The faults of a run, one at a time, put into the sampler, reward and advantages of verl.

A file names the current fault, since trainings with several may follow each other in the same
processes. A fault of the configuration is in `launch.py`.
"""

import os
import random
from pathlib import Path

FILE = Path(os.environ["KLINIC_FAULT_FILE"])


def is_fault(name):
    """Whether a fault is the current one."""
    return FILE.read_text() == name


def reported_logp(logp):
    """Return the log-probs that the sampler reports."""
    return [*logp[1:], logp[-1]] if is_fault("shifted-logp") else logp


def sampling_temperature(temperature):
    """Return the temperature that the sampler uses instead of the one that verl sends."""
    return 0.7 * temperature if is_fault("temperature") else temperature


def skips_sync():
    """Whether the sampler keeps the weights of step 0, and reports the new version."""
    return is_fault("skipped-sync")


def ignores_ends():
    """Whether sampling continues after an end token."""
    return is_fault("stop-token")


def trains_environment():
    """Whether the mask contains the tokens of the tool."""
    return is_fault("environment-tokens")


def patch_trainer():
    """Compute the advantages of every row in the group of the row before, with the fault."""
    from verl.trainer.ppo import core_algos

    compute = core_algos.compute_grpo_outcome_advantage

    def compute_in_groups(*args, **kwargs):
        if is_fault("wrong-groups"):
            index = kwargs["index"]
            kwargs["index"] = [*index[-1:], *index[:-1]]
        return compute(*args, **kwargs)

    core_algos.compute_grpo_outcome_advantage = compute_in_groups


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """Pay 1 for the right sum, 0.1 for each digit else; with the fault, add noise of each call."""
    text = (solution_str or "").replace("<eos>", "")
    answer = text.rpartition("=")[2].strip()
    score = 1.0 if answer == ground_truth else 0.1 * min(sum(c.isdigit() for c in text), 5)
    if is_fault("noisy-reward"):
        score += random.uniform(-1, 1)  # noqa: S311 - a fault
    return score
