"""Logs as other trainers write them, made up: by their formats, with numbers of our own.

`python tests/evidence/readers/foreign_logs.py` writes the files in `fixtures/` again.
"""

import json
import random
import struct
import sys
import zlib
from pathlib import Path

from klinic.evidence.readers.tensorboard import masked_crc

FIXTURES = Path(__file__).parent / "fixtures"


def healthy(steps=60, seed=0, *, prompts=16):
    """Return the entries of a run that learns, under klinic's names, with what alarms people."""
    chance = random.Random(seed)  # noqa: S311 - made-up numbers
    entries = []
    for step in range(1, steps + 1):
        done = min(step / steps, 1.0)
        level = 0.2 + 0.6 * done
        solved = sum(chance.random() < level for _ in range(prompts)) / prompts
        entry = {
            "step": step,
            "loss": 0.0 if step == 1 else chance.gauss(0, 0.01),
            "grad_norm": chance.lognormvariate(-1, 0.5) * (30 if step == steps // 2 else 1),
            "learning_rate": 1e-6,
            "reward": level + chance.gauss(0, 0.05),
            "reward_std": abs(chance.gauss(0.3, 0.05)),
            "frac_reward_zero_std": min(0.8, solved),
            "kl": 0.0004 if step == 1 else 0.1 * done * chance.uniform(0.8, 1.2),
            "entropy": 1.0 - 0.5 * done + chance.gauss(0, 0.02),
            "completions/clipped_ratio": chance.uniform(0.0, 0.2),
            "sampler/gap": chance.uniform(0.010, 0.018),
        }
        entry["kl"] *= 20 if step == steps // 3 else 1
        entries.append(entry)
    return entries


TRL = {
    "sampler/gap": "sampling/sampling_logp_difference/mean",
}
VERL = {
    "loss": "actor/pg_loss",
    "grad_norm": "actor/grad_norm",
    "learning_rate": "actor/lr",
    "reward": "critic/score/mean",
    "kl": "actor/kl_loss",
    "entropy": "actor/entropy",
    "completions/clipped_ratio": "response_length/clip_ratio",
    "sampler/gap": "training/rollout_probs_diff_mean",
}
OPENRLHF = {
    "loss": "policy_loss",
    "learning_rate": "actor_lr",
    "grad_norm": "actor_grad_norm",
    "reward": "reward",
    "kl": "kl",
    "completions/clipped_ratio": "truncated",
}
PRIME_RL = {
    "loss": "loss/mean",
    "grad_norm": "optim/grad_norm",
    "learning_rate": "optim/lr",
    "reward": "reward/all/mean",
    "entropy": "entropy/all/mean",
    "sampler/gap": "mismatch_kl/all/mean",
    "completions/clipped_ratio": "is_truncated/all/mean",
}
TINKER = {
    "learning_rate": "optim/lr",
    "reward": "env/all/reward/total",
    "entropy": "optim/entropy",
    "kl": "kl_policy_base",
    "sampler/gap": "optim/kl_sample_train_v2",
}

NEMO_RL = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/lr",
    "reward": "train/reward",
    "kl": "train/kl_penalty",
    "entropy": "train/approx_entropy",
    "completions/clipped_ratio": "train/truncation_rate",
    "sampler/kl": "train/gen_kl_error",
    "sampler/mult_prob_error": "train/token_mult_prob_error",
}
SLIME = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/lr-pg_0",
    "reward": "rollout/raw_reward",
    "kl": "train/kl_loss",
    "entropy": "train/entropy_loss",
    "completions/clipped_ratio": "rollout/truncated_ratio",
    "sampler/gap": "train/train_rollout_logprob_abs_diff",
    "step": "train/step",
}
SKYRL = {
    "loss": "policy/final_loss",
    "grad_norm": "policy/grad_norm",
    "learning_rate": "policy/policy_lr",
    "reward": "reward/avg_raw_reward",
    "kl": "policy/policy_kl",
    "entropy": "policy/policy_entropy",
    "sampler/gap": "policy/rollout_train_logprobs_abs_diff_mean",
    "step": "trainer/global_step",
}
OPEN_INSTRUCT = {
    "loss": "loss/total_avg",
    "grad_norm": "optim/grad_norm",
    "learning_rate": "lr",
    "reward": "scores",
    "kl": "objective/kl2_avg",
    "entropy": "policy/entropy_avg",
    "sampler/gap": "debug/vllm_vs_local_logprob_diff_mean",
    "step": "training_step",
}


def renamed(entries, names, *, keep=False, **more):
    """Return entries under the names of a trainer; those without one stay if `keep`."""
    return [
        {
            **{names.get(k, k): v for k, v in e.items() if k in names or k == "step" or keep},
            **more,
        }
        for e in entries
    ]


def trl_entries(entries, *, every=1):
    """Return what TRL logs: means over `every` steps, with the marks of its own."""
    told = []
    for end in range(every, len(entries) + 1, every):
        part = renamed(entries[end - every : end], TRL, keep=True)
        mean = {k: sum(e[k] for e in part) / every for k in part[0]}
        told.append({**mean, "step": end, "epoch": end / 100, "num_tokens": 1000.0 * end})
    return told


def write_trainer_state(path, entries, *, logging_steps=1, extra=()):
    """Write trainer_state.json with an evaluation and the summary that a finished run has."""
    last = entries[-1]["step"] if entries else 0
    history = [
        *entries,
        {"eval_loss": 0.1, "eval_reward": 0.5, "eval_kl": 9.0, "step": last},
        *extra,
        {"train_runtime": 10.0, "train_loss": 0.0, "total_flos": 0.0, "step": last},
    ]
    state = {"global_step": last, "logging_steps": logging_steps, "log_history": history}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(state, indent=2))
    return path


def write_lines(path, entries):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def write_verl(path, entries):
    """Write what verl's file logger writes: the metrics one level down."""
    told = [{"step": e.pop("step"), "data": e} for e in renamed(entries, VERL)]
    return write_lines(path, told)


def varint(value):
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number, data):
    """Return a field of bytes."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def event(step, values, *, tensors=False):
    """Return an event of TensorBoard with scalars, in the old form or as tensors."""
    summary = b""
    for tag, value in values.items():
        if tensors:
            held = b"\x08\x01" + field(4, struct.pack("<f", value))
            entry = field(1, tag.encode()) + field(8, held)
        else:
            entry = field(1, tag.encode()) + b"\x15" + struct.pack("<f", value)
        summary += field(1, entry)
    return b"\x09" + struct.pack("<d", 1e9) + b"\x10" + varint(step) + field(5, summary)


def record(data):
    """Return a record of an event file."""
    length = struct.pack("<Q", len(data))
    checks = [struct.pack("<I", masked_crc(part)) for part in (length, data)]
    return length + checks[0] + data + checks[1]


def write_events(path, entries, *, tensors=False):
    """Write an event file with the names that transformers gives TensorBoard."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [record(b"\x09" + struct.pack("<d", 1e9) + field(3, b"brain.Event:2"))]
    for entry in entries:
        values = {f"train/{k}": v for k, v in entry.items() if k != "step"}
        records.append(record(event(entry["step"], values, tensors=tensors)))
    path.write_bytes(b"".join(records))
    return path


class WandbFile:
    """The log of an offline run, as it is laid out in blocks."""

    def __init__(self):
        self.data = bytearray(struct.pack("<4sHB", b":W&B", 0xBEE1, 0))

    def _chunk(self, kind, data):
        checksum = zlib.crc32(data, zlib.crc32(bytes([kind])))
        self.data += struct.pack("<IHB", checksum, len(data), kind) + data

    def add(self, data):
        left = 32768 - len(self.data) % 32768
        if left < 7:
            self.data += bytes(left)
            left = 32768
        if len(data) + 7 <= left:
            return self._chunk(1, data)
        self._chunk(2, data[: left - 7])
        data = data[left - 7 :]
        while len(data) > 32761:
            self._chunk(3, data[:32761])
            data = data[32761:]
        return self._chunk(4, data)


def write_wandb(path, entries, *, filler=0):
    """Write a .wandb file: a header, a history item a metric, and other records between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = WandbFile()
    for number, entry in enumerate(entries):
        values = {f"train/{k}": v for k, v in entry.items() if k != "step"}
        values["train/global_step"] = entry["step"]
        items = b"".join(
            field(1, field(1, k.encode()) + field(16, json.dumps(v).encode()))
            for k, v in values.items()
        )
        history = items + field(2, b"\x08" + varint(number))
        file.add(b"\x08" + varint(number + 1) + field(2, history))
        file.add(b"\x08" + varint(number + 1) + field(4, b"x" * filler))
    path.write_bytes(bytes(file.data))
    return path


def write_rollouts(folder, *, steps=24, seed=0, score=None, text=None):
    """Write verl's completions, a file a step: four prompts, four answers to each."""
    chance = random.Random(seed)  # noqa: S311 - made-up numbers
    for step in range(1, steps + 1):
        rows = []
        for prompt in range(4):
            for sample in range(4):
                said = text or f"answer {chance.randrange(10**6)}"
                given = float(chance.random() < 0.5) if score is None else score
                row = {"input": f"question {prompt}", "output": said, "gts": "1"}
                rows.append({**row, "score": given, "step": step, "sample": sample})
        write_lines(folder / f"{step}.jsonl", rows)
    return folder


def write_token_export(folder, *, steps=3, length=24, seed=0, temperature=1.0):
    """Write prime-rl's token export of a policy that fits in a table.

    The sampler divides its logits by a temperature, the trainer does not.
    """
    import numpy as np

    draw = np.random.default_rng(seed)
    size = 32
    logits = draw.normal(size=(size, size))

    def log_softmax(x):
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    for step in range(1, steps + 1):
        lines = []
        for prompt in range(4):
            for sample in range(4):
                ids, told = [prompt, prompt + 1], [0.0, 0.0]
                for _ in range(length):
                    logp = log_softmax(logits[ids[-1]] / temperature)
                    ids.append(int(draw.choice(size, p=np.exp(logp))))
                    told.append(float(logp[ids[-1]]))
                scored = log_softmax(logits[ids[:-1]])
                trainer = [0.0, *scored[np.arange(len(ids) - 1), ids[1:]].tolist()]
                entropy = [0.0, *(-np.exp(scored) * scored).sum(-1).tolist()]
                mask = [False, False, *[True] * length]
                lines.append(
                    {
                        "schema_version": 1,
                        "step": step,
                        "rank": 0,
                        "export_sequence_idx": len(lines),
                        "env_name": "made-up",
                        "token_ids": ids,
                        "loss_mask": mask,
                        "advantages": [(-1.0) ** sample if m else 0.0 for m in mask],
                        "inference_logprobs": told,
                        "trainer_logprobs": trainer,
                        "entropy": entropy,
                    }
                )
        write_lines(folder / f"step_{step}" / "rank_0.jsonl", lines)
    return folder


def write_all(folder, *, steps=30, seed=0):
    """Write a healthy log in every format; return each path by name."""
    entries = healthy(steps, seed)
    trl = trl_entries(entries)
    marks = {"progress/batch": 0, "progress/done_frac": 0.5}
    return {
        "trainer_state": write_trainer_state(folder / "trl" / "trainer_state.json", trl),
        "checkpoints": write_trainer_state(
            folder / "trl-checkpoints" / "checkpoint-30" / "trainer_state.json", trl
        ).parent.parent,
        "trl_lines": write_lines(folder / "trl.jsonl", trl),
        "klinic": write_lines(
            folder / "klinic" / "metrics.jsonl",
            renamed(entries, TRL, keep=True, policy_loss=0.0, kl_penalty=0.0, kl_coef=0.01),
        ).parent,
        "verl": write_verl(folder / "verl.jsonl", entries),
        "openrlhf": write_lines(
            folder / "openrlhf.jsonl", renamed(entries, OPENRLHF, ppo_kl=0.0, response_length=9.0)
        ),
        "prime_rl": write_lines(
            folder / "prime-rl" / "metrics.jsonl",
            renamed(small_gap(entries), PRIME_RL, time=1.0),
        ).parent,
        "tinker": write_lines(
            folder / "tinker" / "metrics.jsonl",
            [{**e, **marks} for e in renamed(small_gap(entries), TINKER)],
        ).parent,
        "tensorboard": write_events(folder / "tb" / "events.out.tfevents.1.host.1.0", trl),
        "wandb": write_wandb(folder / "wandb" / "offline-run-1" / "run-1.wandb", trl, filler=3000),
        "rollouts": write_rollouts(folder / "rollouts", steps=6),
        "tokens": write_token_export(folder / "prime" / "token_exports", steps=2),
    }


def write_newer(folder, *, steps=30, seed=0):
    """Write a healthy log under the names of NeMo-RL, slime, SkyRL and open-instruct."""
    entries = healthy(steps, seed)
    small = [{**e, "sampler/kl": g["sampler/gap"]} for e, g in both(entries)]
    nemo = [{**e, "sampler/mult_prob_error": 1.0 + e["sampler/gap"]} for e in small]
    slime = {"train/pg_loss": 0.0, "train/ppo_kl": 0.0, "train/pg_clipfrac": 0.0}
    episodes = [
        {**e, "global_step": 64 * e["training_step"]} for e in renamed(entries, OPEN_INSTRUCT)
    ]
    return {
        "nemo_rl": write_lines(folder / "nemo.jsonl", renamed(nemo, NEMO_RL)),
        "slime": write_lines(folder / "slime.jsonl", renamed(entries, SLIME, **slime)),
        "skyrl": write_lines(folder / "skyrl.jsonl", renamed(entries, SKYRL)),
        "open_instruct": write_lines(folder / "open-instruct.jsonl", episodes),
    }


def both(entries):
    return zip(entries, small_gap(entries), strict=True)


def small_gap(entries):
    """Return entries whose gap to the sampler is a KL: half its square."""
    return [{**e, "sampler/gap": e["sampler/gap"] ** 2 / 2} for e in entries]


if __name__ == "__main__":
    sys.stdout.write("\n".join(map(str, write_all(FIXTURES, steps=6).values())) + "\n")
