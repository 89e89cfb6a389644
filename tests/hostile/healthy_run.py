"""A healthy run of three steps, with every file that a command reads."""

import hashlib
import json

import numpy as np

from klinic.evidence.files import Journal
from klinic.evidence.record import StepRecord
from klinic.evidence.run_facts import write_run_facts, write_tokens
from klinic.evidence.store import write_record

STEP = "records/step=000002"
PART, MANIFEST = f"{STEP}/part-00000.parquet", f"{STEP}/complete.json"

RUN = {
    "eos_ids": [1],
    "declared_eos_ids": [1],
    "pad_id": 0,
    "logp_old": "scored",
    "sampling": {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 8},
    "logprob_mode": "processed",
    "vocabulary_size": 30,
    "policy": {"name": "tiny", "digest": "0", "dtype": "float32", "num_experts": 0},
    "reference": {"kind": "copy", "digest": "0", "wanted": "start", "sync_every": None},
    "sampler": {"kind": "torch", "dtype": "float32", "max_version_lag": 0},
    "estimator": "k3",
    "group_size": 2,
    "seed": 3,
}
METRICS = {"reward": 0.5, "kl": 0.1, "loss": 0.0, "entropy": 1.0, "grad_norm": 1.0, "kl_coef": 0.1}
TIMES = {"time/sample": 1.0, "time/reward": 0.1, "time/learn": 2.0, "num_tokens": 12}
EVENT = {"step": 2, "event": "trouble", "act": "skip", "says": "A batch was left out."}
PROBE = {"step": 1, "probe": "rescore", "largest": 0.0}
DIAGNOSIS = {"cause": "stale-sampler", "fix": "Sync it.", "first_step": 2, "findings": []}
RECOVERY = {
    "skipped": [4],
    "known": [],
    "cuts": [{"first": 2, "last": 3, "factor": 0.5}],
    "num_cuts": 1,
    "tried": None,
    "front": 0,
    "tries": 0,
    "last_step": 0,
    "consecutive": 0,
    "back_to": None,
}
FACTS = {"kl_coef": 0.1, "learner_version": 1, "learning_rate": 1e-5, "grad_norm": 1.0}
RECIPE = "seed: 3\nloop:\n  max_steps: 5\n"


def record(step, lengths=(3, 5, 4, 2)):
    """Return a step of a run in which nothing is wrong."""
    rng = np.random.default_rng(step)
    num = sum(lengths)
    logp = -np.abs(rng.normal(size=num)).astype(np.float32)
    return StepRecord(
        step=step,
        row_offsets=np.cumsum([0, *lengths]),
        group=np.arange(len(lengths)) // 2,
        prompt_offsets=np.arange(len(lengths) + 1) * 2,
        prompt_ids=rng.integers(0, 30, len(lengths) * 2),
        reward=rng.normal(size=len(lengths)),
        reward_parts={"legal": rng.normal(size=len(lengths))},
        finish_reason=np.array(["stop"] * len(lengths)),
        token_ids=rng.integers(0, 30, num),
        loss_mask=np.ones(num, bool),
        logp=logp,
        logp_old=logp,
        logp_sampler=logp,
        logp_ref=logp - np.float32(0.1),
        facts={**FACTS, "learner_version": step - 1},
    )


def healthy(folder):
    """Write a run of three steps with every file that a command reads."""
    folder.mkdir(parents=True)
    write_run_facts(folder, RUN)
    write_tokens(folder, {i: f"t{i} " for i in range(30)})
    for step in (1, 2, 3):
        write_record(folder, record(step))
        line = {"step": step, **METRICS, **TIMES, "rewards/legal/mean": 0.5}
        Journal(folder / "metrics.jsonl").append(line)
    Journal(folder / "events.jsonl").append(EVENT)
    Journal(folder / "probes.jsonl").append(PROBE)
    (folder / "diagnosis.json").write_text(json.dumps(DIAGNOSIS))
    (folder / "recovery.json").write_text(json.dumps(RECOVERY))
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / ".lock").touch()
    return folder


def seal(run, *, rows=None, **changes):
    """Make the manifest of step 2 agree with what is there, but for the changes."""
    part = run / PART
    old = json.loads((run / MANIFEST).read_text())
    entry = {
        "file": part.name,
        "rows": old["parts"][0]["rows"] if rows is None else rows,
        "sha256": hashlib.sha256(part.read_bytes()).hexdigest(),
    }
    manifest = {"schema": 1, "step": 2, "parts": [entry], "facts": old["facts"], **changes}
    (run / MANIFEST).write_text(json.dumps(manifest))
